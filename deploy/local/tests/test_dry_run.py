"""`quartet run --dry-run` reports all mistakes at once, names key, value and remedy, and starts nothing.

Each table is one dry run. Errors of a section's fields hide those of its validators, and both hide those of its
service's checks, so each kind has its own table.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import sys

import pytest

from quartet_common.config import ConfigError
from quartet_common.ports import free_port
from quartet_local import config, dry_runs, process
from quartet_local.config import LaunchError
from quartet_local.preflight import check_run

pytestmark = pytest.mark.timeout(300)

KEYS = {
    "run.grup_size=4": "unknown key run.grup_size in --set: did you mean 'group_size'?",
    "run.beta=0.1": "TRL's beta is trainer.kl_coefficient here",
    "run.sampling.temperature=hot": "run.sampling.temperature: got 'hot' in --set: input should be a valid number",
    "trainer.learning_rat=1": "unknown key trainer.learning_rat in --set: did you mean 'learning_rate'?",
    "trainer.algorithm=grop": "trainer.algorithm: got 'grop' in --set: there is no such algorithm here",
    "trainer.weights.transport=ncll": "trainer.weights.transport: got 'ncll' in --set: there is no such transport here",
    "rollout.vllm.gpu_memory_utilisation=0.5": "no such engine argument; did you mean gpu_memory_utilization",
    "rollout.advertise_address=gpu7": "rollout.advertise_address: got 'gpu7' in --set: an address is host:port",
    "reward.worker=2": "unknown key reward.worker in --set: did you mean 'workers'?",
    "reward.sandbox.slot=4": "unknown key reward.sandbox.slot in --set: did you mean 'slots'?",
    "broker.max_run=1": "unknown key broker.max_run in --set: did you mean 'max_runs'?",
    "algorithm.adv_estimator=grpo": "verl's algorithm.adv_estimator is trainer.algorithm here",
    "trainer.distillation.weight=1": "unknown key trainer.distillation.weight in --set: did you mean run.",
    "trainer.reference.modle=big": "unknown key trainer.reference.modle in --set: did you mean 'model'?",
    "run.teachers.far={address='nowhere'}": "run.teachers.far.address: got 'nowhere' in --set: an address is host:port",
    "run.teachers.none={}": "run.teachers.none: in --set: got neither model nor address; allowed: a model to",
    "trianer.mini_batches=1": ": did you mean 'trainer'?",
    "run.id=my run": "run.id: got 'my run' in --set: allowed: 1 to 64 of [a-zA-Z0-9._-], first a letter or digit, such",
}

CONTRADICTIONS = {
    "rollout.engine=sglang": "rollout.engine: got 'sglang' in --set: there is no 'sglang' here; allowed: ",
    "rollout.standalone=true": "rollout.standalone: got true",
    "trainer.tp_size=2": "trainer.tp_size: got 2 in --set: 2 needs plugin = \"hybrid_parallel\", not 'torch_ddp'",
    "reward.functions=['gone.py:close']": "reward.functions[0]: ",
    "reward.reward_model.path=/gone": "reward.reward_model.path: ",
    "data.train=gone.jsonl": "data.train: cannot read 'gone.jsonl': no such file or directory",
}

CANNOT = {
    "run.group_size=1": "run.group_size: got 1; grpo compares a prompt's completions",
    "run.verifiers=['exact', 'mathh']": "run.verifiers[1].name: got 'mathh'; allowed: ",
    "run.sampling.bad_words=['a']": "run.sampling.bad_words: got ('a',); the engine 'transformers' does not take it",
    "run.evaluation_sampling.max_new_tokens=900": "run.evaluation_sampling.max_new_tokens: got 900; allowed: below 256",
}

NAMED = {
    "run.verifiers=[{name='boxd'}, {name='boxed', parameters={corect_reward=1.0}}]": (
        "run.verifiers[0].name: got 'boxd'; allowed: ",
        "run.verifiers[1].parameters.corect_reward: got 1.0; allowed: parameters of 'boxed'",
    ),
    "run.environment={name='calculater'}": "run.environment.name: this rollout has no environment 'calculater'",
    "run.sampling.temperature=0": "run.sampling.temperature: got 0, at which nothing can be trained",
    "rollout.max_unsettled_completions=1": "rollout.max_unsettled_completions: got 1; it must be at least",
    "trainer.evaluation.sets=['heldout2']": "[data.evaluation] has no set 'heldout2': did you mean 'heldout'?",
    "trainer.early_stop.metric=eval/heldout2/acc": "trainer.early_stop.metric: no evaluation has 'eval/heldout2/acc'",
    "trainer.callbacks=[{name='wandbb'}]": "trainer.callbacks[0].name: there is no callback 'wandbb'; there are: wandb",
    "trainer.lora={r=4, target_modules=['qq_proj']}": "no inner linear layer 'qq_proj': did you mean 'q_proj'?",
    "trainer.schedule=linear": "trainer.schedule: a linear over 3 steps with 5 steps of warm-up has no room",
    "trainer.warmup_steps=5": None,
    "trainer.ptx={coefficient=0.1, data='gone.jsonl'}": "trainer.ptx.data: gone.jsonl cannot be read",
    "trainer.checkpoint.folder=/dev/null/here": "trainer.checkpoint.folder: '/dev/null/here' cannot be written",
}
"""None: part of another mistake."""

LONG = (
    "train.jsonl, line 9: prompt.input: got 303 tokens; allowed: at most 248: the model's context of 256 less "
    "max_new_tokens 8"
)
ROWS = (
    ({"prompt": "1+" * 150 + "1=?"}, LONG),
    ({"prompt": "2", "verifiers": ["mathh"]}, "line 10: verifiers[0].name: got 'mathh'; allowed: "),
    ({"prompt": "3", "environment": "sandbx"}, "line 11: environment.name: this rollout has no environment 'sandbx'"),
    (
        {"messages": [{"role": "system", "content": "4"}]},
        "line 12: prompt.chat: got what the model's chat template refuses (only users begin); allowed: a chat it can",
    ),
)
TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception('only users begin') }}{% endif %}{{ messages }}"


@pytest.fixture
def preloaded_services(checkout, monkeypatch):
    """For a check by this process."""
    monkeypatch.setattr(config, "ROOT", checkout)


@pytest.fixture
def dry_run(launch, run_file, tmp_path):
    """Return the errors of a dry run, a line each, and check that it leaves no process or file."""

    def run(*settings: str) -> list[str]:
        words = [word for setting in settings for word in ("--set", setting)]
        launched = launch(run_file, *words, command=("run", "--dry-run"))
        assert launched.wait(90) == 2, launched.said()
        launched.assert_gone(within=2.0)
        assert not (tmp_path / "run").exists(), "a dry run writes nothing"
        lines = launched.said().splitlines()
        assert all(line.startswith("quartet: ") for line in lines), launched.said()
        return lines

    return run


def assert_each_is_reported_once(lines: list[str], expected: list[str]) -> None:
    assert not [words for words in expected if sum(words in line for line in lines) != 1], "\n".join(lines)
    assert len(lines) == len(expected), "\n".join(lines)


@pytest.mark.parametrize("mistakes", [KEYS, CONTRADICTIONS, CANNOT], ids=["keys", "contradictions", "cannot"])
def test_every_mistake_in_a_section_is_reported(dry_run, mistakes):
    lines = dry_run(*mistakes)
    assert_each_is_reported_once(lines, list(mistakes.values()))
    assert all(line.count(",") < 12 for line in lines), "a list of all keys is no answer"


def test_teachers_that_cannot_teach_are_refused(dry_run, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["new"] = tokenizer["model"]["vocab"].pop(next(iter(tokenizer["model"]["vocab"])))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with (tmp_path / "train.jsonl").open("a") as train:
        train.write(json.dumps({"prompt": "2", "gt_answer": "1", "teacher": "huge"}) + "\n")
    lines = dry_run(f"run.teachers.far={{model='{other}'}}", "run.sampling.temperature=0.7", "run.sampling.top_k=5")
    expected = [
        "run.teachers.far.model: ",
        "run.teachers: got far, and the trainer does not use them; set trainer.distillation.coefficient above 0",
        "run.sampling.temperature: got 0.7; run.teachers judge the model's own distribution; allowed: temperature 1",
        "run.sampling.top_k: got 5; run.teachers judge",
        "teacher: got 'huge'; allowed: far",
    ]
    assert_each_is_reported_once(lines, expected)


def test_a_source_of_texts_is_refused_under_mathematics_by_its_rows(dry_run, tmp_path):
    (tmp_path / "own.py").write_text(
        "def train():\n    for _ in range(3):\n        yield {'prompt': '?', 'gt_answer': 'a sentence of some words'}\n"
    )
    own = f"{tmp_path / 'own.py'}:train"
    (line,) = dry_run("run.verifiers=[{name='boxed'}]", f"data.train={own}")
    assert f"{own}: 3 of 3 references are text, not mathematics" in line and f"{own}, row 3: " in line


def test_a_function_that_requires_what_no_row_has_is_refused(dry_run, tmp_path):
    (tmp_path / "own.py").write_text("def close(completion, gt_answer, level): return 1.0\n")
    (line,) = dry_run(f"run.verifiers=['{tmp_path / 'own.py'}:close']")
    assert f"run.verifiers[0]: '{tmp_path / 'own.py'}:close' requires 'level', which no row has" in line
    (tmp_path / "rows.py").write_text("def rows(): yield {'prompt': '1', 'gt_answer': '1', 'level': 2}\n")
    settings = [f"run.verifiers=['{tmp_path / 'own.py'}:close']", f"data.train={tmp_path / 'rows.py'}:rows"]
    (line,) = dry_run(*settings, "run.group_size=1")
    assert "run.group_size: got 1" in line, "a column of rows that the launcher converts is there"


def test_every_source_of_a_mixture_is_checked(dry_run, tmp_path):
    (tmp_path / "rows.py").write_text("def rows(): yield {'prompt': '1', 'gt_answer': 'a sentence of some words'}\n")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "1", "gt_answer": "a text of a few words"}\n')
    lines, rows = tmp_path / "lines.jsonl", f"{tmp_path / 'rows.py'}:rows"
    for sources, titles in (
        (f"['{lines}', '{rows}']", [lines, rows]),  # converted for the services
        (f"[{{path='{lines}', weight=2}}]", [lines]),  # read by them
    ):
        told = dry_run("run.verifiers=['boxed']", f"data.train={sources}", "run.groups_per_step=1")
        assert_each_is_reported_once(told, [f"{title}: 1 of 1 references is text, not mathem" for title in titles])


def test_the_environment_service_checks_the_runs_agent(dry_run, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("async def play(task, endpoint, *, tries: int = 2): return 1.0\n")
    lines = dry_run(f"run.environment={{file='{agent}:play', parameters={{tries='many'}}}}")
    expected = [
        "run.environment.parameters.tries: got 'many'; allowed: ",
        "rollout.http.address: got none; a served en",
    ]
    assert_each_is_reported_once(lines, expected)


def test_tasks_of_an_environment_are_the_data(run_file, tmp_path, preloaded_services):
    agent = tmp_path / "agent.py"
    agent.write_text(
        "async def play(task, endpoint, *, count: int = 2): return 1.0\n"
        "def tasks(count: int = 2):\n    yield from ({'id': f't{i}', 'none': None} for i in range(count))\n"
    )
    settings = [f"data.train={{environment='{agent}:play', parameters={{count=40}}, limit=30}}"]
    with pytest.raises(ConfigError) as refused:  # by the rollout, which has no endpoint; the data are read before
        check_run(run_file, [f"run.environment='{agent}:play'", *settings, "run.groups_per_step=31", "data.passes=1"])
    assert "the training prompts of all passes are 30" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        check_run(run_file, [f"data.train={{environment='{agent}:gone'}}"])
    problems = "; ".join(refused.value.problems)
    assert "data.train.environment: " in problems and "has no function 'gone'" in problems


def test_a_check_that_hangs_is_named_beside_other_mistakes(run_file, monkeypatch):
    command_of = dry_runs.service_command

    def command(service, *settings):
        return ["sh", "-c", "exec sleep 600"] if service.kind == "reward" else command_of(service, *settings)

    monkeypatch.setattr(dry_runs, "service_command", command)
    monkeypatch.setattr(dry_runs, "_STALL_SECONDS", 10.0)
    with pytest.raises(ConfigError) as refused:
        check_run(run_file, ["run.group_size=1"])
    assert sorted(problem.partition(":")[0] for problem in refused.value.problems) == ["reward", "run.group_size"]
    assert "reward: its check failed: for 10 s it neither worked nor wrote" in str(refused.value)


def test_a_check_that_works_is_not_killed(monkeypatch):
    monkeypatch.setattr(dry_runs, "_STALL_SECONDS", 1.0)
    monkeypatch.setattr(dry_runs, "_LOOK_SECONDS", 0.5)
    working = "import time\nwhile time.process_time() < 2: pass\nraise SystemExit(3)"
    assert asyncio.run(dry_runs._dry_run([sys.executable, "-c", working]))[0] == 3


def test_a_redis_server_that_gives_no_version_is_named(monkeypatch):
    monkeypatch.setattr(process, "_FIND_SECONDS", 0.5)
    with pytest.raises(LaunchError, match="redis: 'sleep' gave no answer within 0.5 s; is this machine overloaded"):
        process._output_of(["sleep", "60"])


def test_every_mistake_in_what_a_section_names_is_reported(dry_run, model, run_file, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    with (tmp_path / "train.jsonl").open("a") as train:
        train.writelines(json.dumps({**row, "gt_answer": "1"}) + "\n" for row, _ in ROWS)
    held = f"data.evaluation={{heldout='{tmp_path / 'train.jsonl'}'}}"
    expected = [words for one in NAMED.values() if one for words in ((one,) if isinstance(one, str) else one)]
    nowhere = free_port()
    settings = [f"broker.redis_url=redis://127.0.0.1:{nowhere}/0"]
    expected.append(f"Redis at redis://127.0.0.1:{nowhere}/0 does not answer (")
    with contextlib.ExitStack() as stack:
        for service in ("broker", "trainer"):
            at = "{}:{}".format(*stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname())
            settings.append(f"addresses.{service}={at}")
            expected.append(f"addresses.{service}: cannot listen on {at}")
        lines = dry_run(f"model.path={chatty}", held, *settings, *NAMED)
    assert_each_is_reported_once(lines, [*expected, *(words for _, words in ROWS)])


def test_a_host_without_a_redis_server_is_told(run_file, monkeypatch, preloaded_services):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(process, "_FIND_EMBEDDED", "raise SystemExit(1)")
    with pytest.raises(ConfigError) as refused:
        check_run(run_file, ["trainer.tp_size=2"])
    assert [problem for problem in refused.value.problems if "no redis-server of version 6.2 or later" in problem]
    assert len(refused.value.problems) == 2, "with the other problems"


def test_warnings_of_every_service_are_shown_once(run_file, tmp_path, preloaded_services):
    said: list[str] = []
    nobody = free_port()
    check_run(run_file, [f"tracing.endpoint=127.0.0.1:{nobody}", "run.sampling.top_p=0.9"], said.append)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert [sum(words in line for line in warnings) for words in ("no collector answers", "top_p = 0.9")] == [1, 1]


def test_the_sampling_verifiers_and_metrics_of_a_set_are_checked(dry_run, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=?", "gt_answer": "2"}\n')
    own = f'{{path = "{tmp_path}/own.jsonl", sampling = {{n = 4, max_new_tokens = 900}}, verifiers = ["mathh"]}}'
    lines = dry_run(f"data.evaluation={{own = {own}}}", "trainer.checkpoint.best_metric=eval/own/pass@3")
    expected = [
        "own.jsonl, row 1: sampling.max_new_tokens: got 900; allowed: below 256",
        "own.jsonl, row 1: verifiers[0].name: got 'mathh'; allowed: ",
        "trainer.checkpoint.best_metric: no evaluation has 'eval/own/pass@3': did you mean 'eval/own/pass@",
    ]
    assert_each_is_reported_once(lines, expected)
