"""`quartet eval` starts its own services, with or without a run beside it, and leaves nothing but its answers."""

import json
import os
import signal
from pathlib import Path

import pytest
from launched import ENDLESS
from test_runs import ENDED, READY, steps_of

from quartet_common.checkpoints import read_manifest
from quartet_common.proportions import pass_at_k

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def held(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"2+{n}=?", "gt_answer": str(2 + n)}) + "\n" for n in range(4)))
    return path


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("quartet-eval-*"))


def test_a_checkpoint_is_evaluated_beside_its_run_which_goes_on(launch, run_file, held, tmp_path):
    kept = ("--set", "trainer.checkpoint.interval=2", "--set", "trainer.checkpoint.keep_last=100000")
    table = f'{{path = "{held}", sampling = {{n = 2, max_new_tokens = 4}}, verifiers = ["math"]}}'
    known = ("--set", f"data.evaluation.held={table}", "--set", "trainer.checkpoint.best_metric=eval/held/maj@2")
    running = launch(run_file, *ENDLESS, *kept, *known)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    running.wait_until(lambda: read_manifest(checkpoint) is not None, "the first checkpoint", READY)
    (first, *_) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open() if '"evaluation"' in line)
    quoted = {f"eval/held/{name}{end}" for name in ("avg@2", "pass@2", "maj@2") for end in ("", "_low", "_high")}
    assert quoted <= first.keys() and first["eval/held/judged"] == 8
    assert ", pass@2 " in running.said() and ", maj@2 " in running.said()
    own = ("--config", run_file, *known, "--out", tmp_path / "out")
    evaluated = launch(checkpoint, "held", *own, command=("eval",))
    assert evaluated.wait(240) == 0, evaluated.said()
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["model"]["version"] == 2 and report["sets"]["held"]["policy_versions"] == [2]
    sampling = {"n": 2, "temperature": 1.0, "max_new_tokens": 4}
    assert report["sets"]["held"]["sampling"] == sampling and report["sets"]["held"]["verifiers"] == ["math"]
    assert "\nheld  maj@2" in evaluated.said()
    assert not left(tmp_path)
    attached = ("--attach", "--config", run_file, "-k", 2, "--temperature", 1, "--max-tokens", 4, "--json")
    live = launch("launched", held, *attached, "--out", tmp_path / "live", command=("eval",))
    assert live.wait(60) == 0, live.said()
    report = json.loads((tmp_path / "live" / "results.json").read_text())
    assert report["model"]["run"] == "launched" and report["sets"]["held"]["completions"] == 8
    rescored = launch(tmp_path / "run", "--verifier", "exact", "--json", command=("rescore",))
    assert rescored.wait(60) == 0, rescored.said()
    results = json.loads(rescored.said()[rescored.said().index("[\n") :])
    of_version_0 = sorted(one["id"] for one in results if one["set"] == "held-step-0")
    assert of_version_0 == sorted([f"line-{n}" for n in range(1, 5)] * 2)
    assert all(one["new"]["outcome"] and one["change"][0] in ("right", "wrong") for one in results)
    trained = launch(tmp_path / "run" / "rollouts.jsonl", "--verifier", "exact", "--json", command=("rescore",))
    assert trained.wait(60) == 0, trained.said()
    results = json.loads(trained.said()[trained.said().index("[\n") :])
    logged = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    first = [one for one in results if one["set"] == "rollouts-step-0"]
    assert [one["id"] for one in first] == [score["prompt_id"] for score in logged["scores"]] and first
    assert [one["old"]["reward"] for one in first] == [score["reward"] for score in logged["scores"]]
    assert {one["new"]["reward"] for one in results} <= {0.0, 1.0} and all(one["new"]["outcome"] for one in results)
    steps = steps_of(running)
    running.wait_until(lambda: steps_of(running) > steps, "another step", READY)
    assert "starting it again" not in running.said()
    running.send_signal(signal.SIGINT)
    assert running.wait(ENDED) == 130


def test_a_problem_without_an_answer_is_in_no_figure_and_leaves_logs(launch, run_file, held, model, tmp_path):
    with held.open("a") as lines:
        lines.write(json.dumps({"prompt": "1+" * 2000 + "1=?", "gt_answer": "2001"}) + "\n")  # longer than the context
    elsewhere = ("--config", run_file, "--set", "model.path=/no/such/model", "--out", tmp_path / "out")
    evaluated = launch(model, held, *elsewhere, command=("eval",))
    assert evaluated.wait(240) == 1, evaluated.said()
    (folder,) = left(tmp_path)
    assert evaluated.said().splitlines()[-1] == f"the services' logs are in {folder}/logs"
    assert (folder / "logs" / "rollout.log").exists()
    assert "held: line-5 has no score: prompt cannot be used: prompt.input: got 4003 tokens" in evaluated.said()
    report = json.loads((tmp_path / "out" / "results.json").read_text())["sets"]["held"]
    assert (report["problems"], report["failed"], report["completions"]) == (5, 1, 4)
    evaluated.assert_gone(within=1.0)


def test_an_evaluation_that_is_refused_leaves_no_folder(launch, run_file, held, model, tmp_path):
    typo = ("--config", run_file, "--set", "reward.worker=2", "--verifier", "mathh", "--out", tmp_path / "out")
    evaluated = launch(model, held, *typo, command=("eval",))
    assert evaluated.wait(90) == 2 and "unknown key reward.worker" in evaluated.said(), evaluated.said()
    assert not left(tmp_path) and not (tmp_path / "out").exists()


def test_ctrl_c_of_an_evaluation_leaves_nothing(launch, run_file, held, model, tmp_path):
    evaluated = launch(model, held, "--config", run_file, "--out", tmp_path / "out", command=("eval",))
    evaluated.wait_for_line("reward ready", READY)
    evaluated.send_signal(signal.SIGINT)
    assert evaluated.wait(ENDED) == 130, evaluated.said()
    evaluated.assert_gone(within=1.0)
    assert "Traceback" not in evaluated.said() and not left(tmp_path) and not (tmp_path / "run").exists()


REWARD = """
import time

def right(completion, gt_answer):
    time.sleep(0.05)
    if gt_answer == "13":
        raise ValueError("no thirteen")
    return True
"""


def answers(folder: Path) -> list[dict]:
    path = folder / "many.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )


@pytest.fixture
def evaluate(launch, model, tmp_path):
    """Start an evaluation of `count` problems, of which each completion is right by a slow function."""
    (tmp_path / "reward.py").write_text(REWARD)

    def start(count: int):
        rows = ({"prompt": f"{n}+0=?", "gt_answer": str(n)} for n in range(count))
        (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        drawn = ("-k", 2, "--temperature", 1, "--max-tokens", 4, "--verifier", f"{tmp_path}/reward.py:right")
        own = ("--engine", "transformers", "--out", tmp_path / "out", "--json")
        return launch(model, tmp_path / "many.jsonl", *drawn, *own, command=("eval",))

    return start


def test_an_evaluation_that_was_killed_goes_on_where_it_was(evaluate, launch, tmp_path):
    first = evaluate(12)
    first.wait_until(lambda: len(answers(tmp_path / "out")) >= 3, "three answers", READY)
    first.send_signal(signal.SIGKILL)
    first.wait(ENDED)
    first.assert_gone(within=10.0)
    kept = answers(tmp_path / "out")
    with (tmp_path / "out" / "many.jsonl").open("a") as file:
        file.write('{"place": 11, "mod')  # as a kill in the middle of a line leaves it
    second = evaluate(12)
    assert second.wait(240) == 0, second.said()
    found = answers(tmp_path / "out")
    assert found[: len(kept)] == kept and sorted(one["place"] for one in found) == list(range(12))
    assert f"many: {len(kept)} of 12 problems are in" in second.said()
    report = json.loads((tmp_path / "out" / "results.json").read_text())["sets"]["many"]
    assert report["failed"] == 0 and report["completions"] == 24 and report["metrics"]["avg@2"]["value"] == 1.0
    assert len({one["row"]["sampling"]["seed"] for one in found}) == 12
    again = launch(tmp_path / "out" / "many.jsonl", "--verifier", "math", "--json", command=("rescore",))
    assert again.wait(60) == 0, again.said()
    results = json.loads(again.said()[again.said().index("[\n") :])
    by_problem: dict[str, int] = {}
    for one in results:
        assert one["old"]["ans_acc"] == 1.0
        changed = one["new"]["ans_acc"] < 0.5
        assert one["changed"] == changed and one["change"] == ["right", "wrong" if changed else "right"]
        by_problem[one["id"]] = by_problem.get(one["id"], 0) + (not changed)
    assert len(results) == 24 and sum(pass_at_k(2, right, 2) for right in by_problem.values()) < 12, "it is untrained"
    other = launch(*second.args[second.args.index("eval") + 1 : -1], "-k", "3", command=("eval",))
    assert other.wait(60) == 2 and "has answers with another sampling: " in other.said(), other.said()


def test_neither_a_killed_reward_service_nor_a_failed_verifier_is_a_wrong_answer(evaluate, tmp_path):
    evaluated = evaluate(24)
    evaluated.wait_until(lambda: len(answers(tmp_path / "out")) >= 3, "three answers", READY)
    os.kill(evaluated.service("reward"), signal.SIGKILL)
    assert evaluated.wait(240) == 1, evaluated.said()
    assert "reward was killed by SIGKILL; starting it again" in evaluated.said()
    found = answers(tmp_path / "out")
    assert sorted(one["place"] for one in found) == [n for n in range(24) if n != 13]
    assert all(completion["reward"] == 1.0 for one in found for completion in one["completions"])
    report = json.loads((tmp_path / "out" / "results.json").read_text())["sets"]["many"]
    assert (report["completions"], report["failed"], report["metrics"]["pass@2"]["value"]) == (46, 1, 1.0)
    assert "ValueError: no thirteen" in "".join(report["failures"]["line-14"])
    assert "1 problems have no score and are in no figure" in evaluated.said()
