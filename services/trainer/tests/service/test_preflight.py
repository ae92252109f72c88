"""What the trainer says of a run file before it starts."""

import logging
from pathlib import Path
from typing import Any

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_trainer.config import TrainerSection
from quartet_trainer.preflight import preflight

LENGTH = "run.verifiers=[{name='math'}, {name='length'}]"


def check(model_path: Path, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    basics = [f"model.path={model_path}", f"run.folder={tmp_path}"]
    return preflight(load_config("trainer", TrainerSection, None, [*basics, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["run.sampling.top_p=0.9"], "run.sampling: top_p = 0.9 without run.sampling_masks biases every"),
        (["run.sampling.top_p=0.9", "run.sampling_masks=true"], None),
        (
            ["trainer.algorithm=dapo", LENGTH],
            "trainer.mask_truncated leaves completions out of the loss that the verifier",
        ),
        (["trainer.algorithm=dapo", "trainer.mask_truncated=false", LENGTH], None),
    ],
)
def test_a_combination_that_is_hardly_meant_is_warned_of(
    model_path: Path, tmp_path: Path, caplog, overrides: list[str], warning: str | None
):
    caplog.set_level(logging.WARNING)
    check(model_path, tmp_path, *overrides)
    assert [record.message.startswith(warning or "nothing") for record in caplog.records] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        (["trainer.learning_rat=1"], ["unknown key trainer.learning_rat in --set: did you mean 'learning_rate'?"]),
        (
            ["run.sampling.temperature=0"],
            ["run.sampling.temperature: got 0, at which nothing can be trained; allowed: 1e-06 or above"],
        ),
        (
            ["run.router_replay=true"],
            ["run.router_replay is true; a 'qwen2' model has no experts that its routers choose by top-k scores"],
        ),
        (
            ["run.sampling.repetition_penalty=1.1", "run.sampling.logit_bias={7=2.0}"],
            ["run.sampling.repetition_penalty: got 1.1; the", "run.sampling.logit_bias: got {7: 2.0}; the rollout's"],
        ),
        (["trainer.interface=eth77"], ["trainer.interface: this host has no network interface 'eth77' with an add"]),
        (["trainer.weights.interface=eth77"], ["trainer.weights.interface: this host has no network interface 'et"]),
    ],
    ids=lambda values: values[0],
)
def test_what_cannot_be_trained_is_refused(
    model_path: Path, tmp_path: Path, overrides: list[str], sentences: list[str]
):
    with pytest.raises(ConfigError) as refusal:
        check(model_path, tmp_path, *overrides)
    for problem, start in zip(refusal.value.problems, sentences, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "one"}, "RANK: got 'one'; allowed: a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: got 2; allowed: 0 to WORLD_SIZE - 1, 1"),
        ({"WORLD_SIZE": "2"}, "RANK: got None; allowed: 0 to WORLD_SIZE - 1, 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "alpha"}, "MASTER_ADDR, MASTER_PORT: an address is host:por"),
    ],
    ids=lambda value: str(value),
)
def test_variables_of_no_rank_are_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        check(model_path, tmp_path)
    assert [problem[: len(sentence)] for problem in refusal.value.problems] == [sentence]
