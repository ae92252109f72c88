"""The `quartet` command: what it prints, and its exit status for every way of ending."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from real_broker import Life, echo, life_of

from quartet_client.cli.main import main
from quartet_contract.world import instance


@pytest.fixture
def quartet(addresses, capsys):
    """Run `quartet` on the services; return (exit status, standard output, standard error)."""

    def _quartet(*arguments: str) -> tuple[int, str, str]:
        own = {kind: at for kind, at in addresses.items() if f"addresses.{kind}" not in str(arguments)}
        status = main([*arguments, *(f'--set=addresses.{kind}="{address}"' for kind, address in own.items())])
        return status, *capsys.readouterr()

    return _quartet


@pytest.fixture
def run_file(run_file_of):
    return run_file_of("demo", 4, "held", run="max_steps = 2")


@pytest.fixture
def life(address):
    return Life(address, "demo")


def test_prompts_are_submitted_and_their_results_printed(life, quartet, write, monkeypatch):
    path = write("p.jsonl", '{"prompt": "2+3=5", "gt_answer": "5", "id": "sum"}\n{"prompt": "hello"}\n')
    submit = ("submit", str(path), "--run", "demo", "--prefix", "mine")
    assert quartet(*submit)[:2] == (0, "mine/0\nmine/1\n")
    life.answer()
    status, out, _ = quartet(*submit, "--wait")
    first, second = map(json.loads, out.splitlines())
    assert status == 0 and first["id"] == "sum" and first["completions"][0]["reward"] == 1.0
    assert first["completions"][0]["policy_version"] == 3 and second["completions"][0]["text"] == "hello"
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "a"}\n'))
    assert quartet("submit", "-", "--run", "demo", "--prefix", "read")[:2] == (0, "read/0\n")
    gone = quartet("submit", "/gone.jsonl", "--run", "demo")
    assert gone == (2, "", "quartet: FILE: cannot read '/gone.jsonl': no such file or directory\n")
    write("p.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n')
    status, out, err = quartet("submit", str(path), "--run", "demo")
    assert (status, out) == (2, "") and life.now().stats.submitted == 3
    assert err.startswith(f'quartet: {path}, line 2: unknown field "promt"; did you mean "prompt"?')


def test_generate_and_score(quartet, run_file_of):
    status, out, _ = quartet("generate", "hi", "-n", "2", "--json")
    assert status == 0 and [json.loads(line)["text"] for line in out.splitlines()] == ["hi", "hi"]
    assert "hi" in quartet("generate", "hi")[1]
    status, out, _ = quartet("score", "it is 5", "--answer", "5", "--verifier", "exact")
    assert status == 0 and out.startswith("reward 1  correct")
    assert quartet("score", "it is 5", "--json")[0] == 1  # no reference: the verifier fails
    rows = str(run_file_of("rows", 30, "held"))
    status, out, _ = quartet("score", rows, "--attach")
    assert status == 0 and out.endswith("20 rows: 20 correct, reward 1 on average, 1 to 1, at most 0.000 s\n")
    assert quartet("score", rows, "--attach", "--rows", "2", "--completion", "")[0] == 0


def test_runs_are_listed_and_shown(address, quartet):
    assert quartet("runs", "list")[1] == "no runs\n"
    demo = Life(address, "demo")
    assert "demo" in quartet("runs", "list")[1]
    assert json.loads(quartet("runs", "list", "--json")[1])[0]["state"] == "active"
    assert "group_size" in quartet("runs", "show", "demo")[1]
    mixed = instance("pass-0/first/0", source="first")
    demo.call("SubmitPrompts", pb.SubmitPromptsRequest(run_id="demo", instances=[mixed]))
    demo.answer()
    shown = quartet("runs", "show", "demo")[1]
    assert "first" in shown and "1 used, 0 skipped as solved, 0 as hopeless, accuracy 0.000" in shown
    assert json.loads(quartet("runs", "show", "demo", "--json")[1])["sources"][0]["used"] == 1
    status, _, err = quartet("runs", "delete", "demo")
    assert status == 2 and err.startswith("quartet: run 'demo': it is active: ") and err.count("\n") == 1
    assert quartet("runs", "finish", "demo", "--reason", "enough")[1] == "run demo was cancelled: enough\n"
    assert quartet("runs", "delete", "demo")[1] == "run demo is deleted\n"
    assert json.loads(quartet("runs", "delete", "demo", "--json")[1]) == {"run_id": "demo", "deleted": False}
    assert quartet("runs", "show", "demo")[0] == 2


def test_dead_prompts_are_listed_and_requeued(life, quartet, write):
    assert quartet("dead", "list", "demo")[1] == "no dead prompts in run demo\n"
    lines = [
        {"prompt": "two plus two", "gt_answer": "4", "verifiers": [{"name": "boxed"}], "id": "sum"},
        {"messages": [{"role": "user", "content": "hello"}], "gt_answer": "7"},
        {"prompt": "kept"},
    ]
    submit = ("submit", str(write("p.jsonl", "\n".join(map(json.dumps, lines)))), "--run", "demo", "--prefix", "x")
    assert quartet(*submit)[0] == 0
    too_long, answered, kept = life.lease()
    life.put([answered])
    done = echo(kept.instance)
    done.completions[0].ClearField("score")
    unscored = experience_pb2.UnscoredGroup(group={"transcript": done.SerializeToString()}).SerializeToString()
    for lease, failure, group in ((too_long, "too long", b""), (kept, "it raised (own.py:7)", unscored)):
        release = pb.LeaseRelease(lease_id=lease.lease_id, failure=failure, permanent=True, unscored=group)
        life.call("ReleaseLeases", pb.ReleaseLeasesRequest(run_id="demo", releases=[release]))
    status, out, _ = quartet(*submit, "--wait")
    results = {result["instance_id"]: result for result in map(json.loads, out.splitlines())}
    assert status == 1 and results["x/0"]["dead"] == ["too long"] and "completions" in results["x/1"]
    assert json.loads(quartet("dead", "list", "demo", "--json")[1])["dead"][0]["reasons"] == ["too long"]
    status, out, _ = quartet("dead", "show", "demo", "x/0")
    assert status == 0 and "too long" in out and "after 1 attempt" in out and "two plus two" in out
    (shown,) = json.loads(quartet("dead", "show", "demo", "x/0", "--json")[1])
    assert shown["reasons"] == ["too long"] and shown["instance"]["prompt"]["text"] == "two plus two"
    status, _, err = quartet("dead", "show", "demo", "x/1")
    assert status == 2 and "prompt 'x/1' of run 'demo' is not dead: it is" in err
    status, out, _ = quartet("dead", "show", "demo", "x/2")
    assert status == 0 and "own.py:7" in out and "completions that are kept to be scored" in out
    assert quartet("dead", "requeue", "demo")[0] == 2
    assert quartet("dead", "requeue", "demo", "x/0")[1] == "1 prompt queued again\n"
    assert [lease.instance.instance_id for lease in life.lease()] == ["x/0"]


def test_status_shows_each_service(life, quartet, nowhere):
    status, out, _ = quartet("status", f"--set=addresses.trainer={nowhere}", "--json")
    broker, reward, rollout, trainer = (each for each in json.loads(out) if each["address"] != "127.0.0.1:1")
    assert status == 1 and broker["health"] == "serving" and rollout["details"]["engine"] == "echo"
    assert reward["details"] == {"verifiers": ["exact"]} and trainer["health"] == "unreachable"


def test_run_attached_feeds_and_follows_until_the_run_ends(address, quartet, run_file):
    life = life_of(address, run_file)

    def train_when_fed() -> None:
        deadline = time.monotonic() + 20
        while not life.now().prompts_ended and time.monotonic() < deadline:
            time.sleep(0.02)
        for step in range(2):
            metrics = {"reward/mean": 0.25 * (step + 1), "staleness/mean": 0.0}
            if step:
                metrics |= {"reward/ans_acc": 0.5, "reward/math/ans_acc": 1.0, "reward/code/ans_acc": 0.0}
            life.report(step=pb.StepFinished(step=step, policy_version=step + 1, metrics=metrics))
        told = {"eval/held/ans_acc": 0.75, "eval/held/reward": 0.8, "eval/held/reward/math/ans_acc": 0.75}
        told |= {"eval/held/reward/math/mean": 0.9, "eval/held/reward/length/mean": -0.1}
        life.report(evaluation=pb.EvaluationFinished(evaluation_set="held", policy_version=2, metrics=told))
        lost = {"eval/held/reward": 0.8, "eval/held/prompts": 78, "eval/held/dead": 2}
        life.report(evaluation=pb.EvaluationFinished(evaluation_set="held", policy_version=3, metrics=lost))
        mine = {name.replace("held", "mine"): value for name, value in told.items()}
        life.report(evaluation=pb.EvaluationFinished(evaluation_set="mine", policy_version=3, metrics=mine))
        life.finish(pb.RUN_STATE_FAILED)

    threading.Thread(target=train_when_fed).start()
    status, out, err = quartet("run", str(run_file), "--attach")
    assert (status, err) == (1, "")
    assert [line for line in out.splitlines() if line != "trainer trains its first batch"] == [  # said if it takes long
        "run demo is active",
        "step 1/2  reward 0.250  accuracy –  staleness 0.00",
        "step 2/2  reward 0.500  accuracy by code and math (weighted mean) 50.0%  staleness 0.00",
        "evaluation held at version 2: accuracy 0.750 by math  reward 0.800 (length -0.100, math 0.900)",
        "evaluation held at version 3: incomplete: 78 of 80",
        "evaluation mine at version 3: accuracy 0.750 by math  reward 0.800 (length -0.100, math 0.900)",
        "run demo failed: enough",
        "accuracy on held: incomplete: 78 of 80",
        "accuracy on mine: 75.0% by math → 75.0% by math",
        "reward on mine: 0.800 (length -0.100, math 0.900) → 0.800 (length -0.100, math 0.900)",
    ]
    assert quartet("watch", "demo")[0] == 1


def test_dry_run_says_what_would_run_and_touches_nothing(quartet, run_file):
    settings = ("--set", "data.passes=3", "--set", "run.group_size=4")
    status, out, _ = quartet("run", str(run_file), "--attach", "--dry-run", *settings)
    plan = json.loads(out)
    assert status == 0 and plan["run"]["group_size"] == 4 and plan["services"] == "those running at [addresses]"
    assert plan["data"]["prompts"] == 4 and plan["data"]["prompt_instances"] == 12
    assert plan["data"]["evaluation"] == {"held": 1} and quartet("runs", "list")[1] == "no runs\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "gone.toml"], "run file: cannot read 'gone.toml': no such file or directory"),
        (["run", "RUN", "--attach", "--wait", "0", "--broker", "NOWHERE"], "broker at NOWHERE: nothing listens there"),
        (["runs", "list", "--broker", "nonsense"], "an address is host:port"),
        (["watch", "gone"], "run 'gone' does not exist"),
        (["watch", "\udcff"], "an argument or the input is not UTF-8: "),
        (["dashboard", "--host", "192.0.2.1"], "tunnel: ssh -L 7180:127.0.0.1:7180 HOST"),
        (["eval", "./FOLDER", "other", "--config", "RUN"], "or FILE.py:FUNCTION; a set of the run file: held"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(address, capsys, run_file, nowhere, arguments, sentence):
    def fill(text: str) -> str:
        return text.replace("RUN", str(run_file)).replace("NOWHERE", nowhere).replace("FOLDER", str(run_file.parent))

    if "--broker" not in arguments:
        arguments = [*arguments, "--broker", address]
    assert main([fill(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("quartet: ") and captured.err.count("\n") == 1
    assert fill(sentence) in captured.err
    assert main(["runs", "list", "--broker", address]) == 0 and capsys.readouterr().out == "no runs\n"


def test_plot_draws_a_run_folder(tmp_path, capsys, write):
    lines = [{"kind": "step", "step": step, "time": step, "reward/mean": 0.5, "train/loss": 1.0} for step in range(3)]
    lines.append({"kind": "evaluation", "set": "held", "policy_version": 0, "eval/held/ans_acc": 0.5})
    write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path), "--metric", "train/loss"]) == 0
    assert main(["plot", str(tmp_path), "--metric", "reward/mena"]) == 2
    assert "--metric: no step has 'reward/mena'; did you mean 'reward/mean'?" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "gone" / "a.png")]) == 2
    assert "a.png': No such file or directory" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "gone")]) == 2 and "it has no metrics.jsonl" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(capsys, monkeypatch, tmp_path):
    full = open("/dev/full", "w")  # noqa: SIM115  (its end fails too)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["certs", "show", str(tmp_path), "--json"]) == 2
    assert capsys.readouterr().err == "quartet: a file cannot be written (No space left on device); make room\n"
    with suppress(OSError):
        full.close()


def test_what_the_locale_cannot_write_is_escaped(tmp_path):
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "quartet_client", "status", "--broker", "✗:1"]
    done = subprocess.run(
        command, capture_output=True, cwd=tmp_path, env={**os.environ, **variables}, timeout=60, check=False
    )
    assert b"\\u2717:1" in done.stdout and done.stderr == b""


def test_ctrl_c_ends_the_dashboard_although_its_browser_is_open(address):
    shown = {"DISPLAY": ":9", "CI": "", "BROWSER": "sh -c 'sleep 20' %s"}
    environment = {**os.environ, **shown, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "quartet_client", "dashboard", "--port", "0", "--broker", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline().startswith("dashboard at http://127.0.0.1:")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) == 0
    process.stdout.close()


def test_sigterm_leaves_the_terminal_its_cursor(address, life):
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "quartet_client", "watch", "demo", "--broker", address]
    master, slave = os.openpty()
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while b"demo" not in shown:
        shown += os.read(master, 65536)
    process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # the other side is closed
        while part := os.read(master, 65536):
            shown += part
    os.close(master)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1 and b"Traceback" not in shown


def test_ctrl_c_ends_it_with_130_and_without_a_traceback(address, run_file):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "quartet_client", "run", str(run_file), "--attach", "--broker", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "run demo is active\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert main(["runs", "finish", "demo", "--broker", address]) == 0, "it goes on without this process"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "run.toml", "run.group_size=8"], "is set by: --set run.group_size=8\n"),
        (["run", "run.toml", "--set", "run.id=a", "--trainer.lora.r=8"], "is set by: --set trainer.lora.r=8\n"),
        (["train", "run.toml"], "To train: quartet run FILE.toml\n"),
    ],
)
def test_a_command_line_of_another_project_is_told_the_form_here(words, told, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(told)
