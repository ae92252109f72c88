"""ColossalChat's flags as a run file: values, defaults, remarks, refusals."""

import tomllib
from pathlib import Path

import pytest

from quartet_client.cli.main import main
from quartet_client.cli.migrate import PRESETS, migrate
from quartet_client.errors import InputError
from quartet_common.presets import TRAINER_PRESETS


def read(flags: str) -> dict:
    return tomllib.loads(migrate(flags))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n" * 640)
    return path


def test_defaults_are_colossalchats(data: Path):
    file = read(f"-m /models/qwen -d {data}")
    assert file["run"]["group_size"] == 8 and file["run"]["max_staleness"] == 0
    assert file["run"]["groups_per_step"] == 64, "32 prompts for each of two data-parallel ranks"
    assert file["run"]["max_prompt_tokens"] == 512 and file["run"]["sampling"]["max_new_tokens"] == 3584
    assert file["run"]["verifiers"] == [{"name": "think_answer_tags"}]
    trainer = file["trainer"]
    assert (trainer["algorithm"]["name"], trainer["learning_rate"], trainer["kl_coefficient"]) == ("grpo", 1e-6, 0.01)
    assert (trainer["schedule"], trainer["schedule_steps"], trainer["min_learning_rate_ratio"]) == ("cosine", 10, 0.1)
    assert (trainer["weight_decay"], trainer["max_grad_norm"], trainer["precision"]) == (0.01, 1.0, "bf16")
    assert file["rollout"]["engine"] == "transformers" and file["data"]["passes"] == 1
    assert trainer["evaluation"]["sets"] == [] and trainer["checkpoint"]["interval"] == 100


@pytest.mark.parametrize("algorithm", PRESETS)
def test_each_algorithm_has_its_preset(algorithm: str, data: Path):
    """What the trainer takes with `trainer.preset` alone is what is written down here."""
    trainer, preset = read(f"-m m -d {data} -a {algorithm}")["trainer"], TRAINER_PRESETS[PRESETS[algorithm]]
    assert {key: trainer[key] for key in preset} == preset
    assert trainer["kl_coefficient"] == (0.0 if algorithm == "DAPO" else 0.01)
    flagged = read(f"-m m -d nowhere.jsonl -a {algorithm} -lr 3e-6 -kl 0.2")["trainer"]
    assert flagged["learning_rate"] == 3e-6 and "schedule" not in flagged
    assert flagged["kl_coefficient"] == (0.0 if algorithm == "DAPO" else 0.2)


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("-e 3 -temp 1.2", "run", {"temperature_schedule": None}),  # how long the episode is is not known
        ("-t 8 -tp 2 -pp 2", "trainer", {"plugin": "hybrid_parallel", "tp_size": 2, "pp_size": 2, "zero_stage": None}),
        ("-t 8 -tp 2 -pp 2", "run", {"groups_per_step": 64}),  # two data-parallel groups
        ("-t 4 -tp 2 -zero 2", "trainer", {"zero_stage": 2}),
        ("-t 4 -pp 2 -zero 2", "trainer", {"zero_stage": 1}),
        ("-a DAPO", "trainer", {"dynamic_sampling": {"accuracy_range": [0.01, 0.99]}}),
    ],
)
def test_flags_become_keys(flags, section, expected):
    found = read(f"-m m -d d {flags}")[section]
    assert {key: found.get(key) for key in expected} == expected


def test_the_kl_of_reinforce_ppb_is_not_in_the_loss():
    algorithm = read("-m m -d d -a REINFORCE_PPB")["trainer"]["algorithm"]
    assert (algorithm["kl_in"], algorithm["kl_estimator"]) == ("reward", "k3")


def test_what_has_no_counterpart_is_named_with_the_reason():
    text = migrate("python rl_example.py -m m -d d -ibs 64 -cv http://judge -cbsl 4 --enable_profiling -i 3 -ptp 4")
    for words in (
        "--inference-batch-size is not needed: rollouts batch continuously",
        "--code-verifier is not needed: the sandbox is part of the reward service",
        "--consumer-batch-size-limit is not needed: run.max_experience_bytes",
        "[launcher]\nrollouts = 3\n",
        '[tracing]\nfile = "runs/GRPO/spans.json"\n',
        "-ptp 4 is for vllm: the transformers engine has one device",
        "'d' is not here, so its steps could not be counted",
    ):
        assert words in text
    assert "-zero 2 is not possible beside -pp" in migrate("-m m -d d -t 4 -pp 2 -zero 2")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("-d d", "-m/--model"),
        ("-m m -d d -t 3 -tp 2", "-t 3 is no multiple of -tp x -pp = 2"),
        ("-m m -d d -tp 0", "argument -tp/--tensor-parallel-size: got 0; allowed: integers from 1"),
        ("-m m -d d -ed '[1]'", "-ed takes a JSON object"),
    ],
)
def test_what_it_cannot_read_is_refused_in_one_sentence(flags: str, sentence: str):
    with pytest.raises(InputError) as refused:
        migrate(flags)
    assert sentence in str(refused.value)


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]):
    assert main(["migrate-colossalchat", "-m m -d d -b vllm -ptp 2 -s 'Think \"first\".'"]) == 0
    file = tomllib.loads(capsys.readouterr().out)
    assert file["rollout"] == {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    assert file["run"]["system_prompt"] == 'Think "first".'
    assert main(["migrate-colossalchat", "-m", "hello", "-d", "with a space"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["data"]["train"] == "with a space"
    assert main(["migrate-colossalchat", "-m m"]) == 2
    assert "the following arguments are required" in capsys.readouterr().err
