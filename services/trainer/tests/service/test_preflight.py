"""What the trainer says of a run file before it starts: refusals are in test_service.py."""

import logging
from pathlib import Path

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_trainer.config import TrainerSection
from quartet_trainer.preflight import preflight

LENGTH = "run.verifiers=[{name='math'}, {name='length'}]"


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ([], None),
        (["run.sampling.top_p=0.9"], "run.sampling: top_p = 0.9 without run.sampling_masks biases every"),
        (["run.sampling.top_k=20", "run.sampling.min_p=0.05"], "run.sampling: top_k = 20, min_p = 0.05 without"),
        (["run.sampling.bad_words=['no']"], "run.sampling: bad_words = ('no',) without run.sampling_masks biases"),
        (["run.sampling.top_p=0.9", "run.sampling_masks=true"], None),
        (["run.evaluation_sampling.top_p=0.9", "run.evaluation_sampling.repetition_penalty=1.1"], None),
        (["trainer.algorithm=dapo"], None),
        ([LENGTH], None),
        (
            ["trainer.algorithm=dapo", LENGTH],
            "trainer.mask_truncated leaves completions out of the loss that the verifier",
        ),
        (["trainer.mask_truncated=true", LENGTH], "trainer.mask_truncated leaves completions out of the loss"),
        (["trainer.algorithm=dapo", "trainer.mask_truncated=false", LENGTH], None),
    ],
)
def test_a_combination_that_is_hardly_meant_is_warned_of(
    model_path: Path, tmp_path: Path, caplog, overrides: list[str], warning: str | None
):
    caplog.set_level(logging.WARNING)
    basics = [f"model.path={model_path}", f"run.folder={tmp_path}"]
    preflight(load_config("trainer", TrainerSection, None, [*basics, *overrides]))
    assert [record.message.startswith(warning or "nothing") for record in caplog.records] == [True] * bool(warning)


def test_router_replay_of_a_dense_model_is_refused_before_anything_starts(model_path: Path, tmp_path: Path):
    wanted = [f"model.path={model_path}", f"run.folder={tmp_path}", "run.router_replay=true"]
    with pytest.raises(ConfigError, match="run.router_replay is true; a 'qwen2' model has no experts that its routers"):
        preflight(load_config("trainer", TrainerSection, None, wanted))


def test_sampling_that_cannot_be_replayed_is_refused(model_path: Path, tmp_path: Path):
    penalized = ["run.sampling.repetition_penalty=1.1", "run.sampling.logit_bias={7=2.0}"]
    with pytest.raises(ConfigError) as refusal:
        preflight(
            load_config(
                "trainer", TrainerSection, None, [f"model.path={model_path}", f"run.folder={tmp_path}", *penalized]
            )
        )
    starts = "run.sampling.repetition_penalty: got 1.1; the", "run.sampling.logit_bias: got {7: 2.0}; the rollout's"
    assert [problem.startswith(start) for problem, start in zip(refusal.value.problems, starts, strict=True)] == [
        True
    ] * 2
