"""`trainer.preset`: another program's defaults, below what the run file writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from quartet_common.config import ConfigError, load_config
from quartet_common.presets import TRAINER_PRESETS, PresetName
from quartet_trainer.config import TrainerSection
from quartet_trainer.learner import LearnerSettings
from quartet_trainer.preflight import preflight

PUBLISHED: dict[str, dict[str, Any]] = {
    "colossalchat-grpo": {"algorithm": "grpo", "clip": (0.2, 0.2), "kl": (0.01, "k3", "loss"), "sequences": True},
    "colossalchat-dapo": {"algorithm": "dapo", "clip": (0.2, 0.28), "kl": (0.0, None, None), "sequences": False},
    "colossalchat-reinforce-ppb": {
        "algorithm": "reinforce_pp_baseline",
        "clip": (0.2, 0.2),
        "kl": (0.01, "k3", "reward"),
        "sequences": True,
    },
    "colossalchat-rloo": {"algorithm": "rloo", "clip": (0.2, 0.2), "kl": (0.01, "k3", "loss"), "sequences": True},
}
"""What its source says, put down apart from the table."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_what_colossalchat_trains_with(preset: str) -> None:
    found, expected = LearnerSettings(preset=preset), PUBLISHED[preset]
    assert found.algorithm == expected["algorithm"]
    assert (found.clip_low, found.clip_high) == expected["clip"]
    assert (found.kl_coefficient, found.kl_estimator, found.kl_in) == expected["kl"]
    assert found.aggregation == ("sequence-mean-token-mean" if expected["sequences"] else "token-mean")
    assert (found.learning_rate, found.weight_decay, found.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (found.schedule, found.warmup_steps, found.min_learning_rate_ratio) == ("cosine", 0, 0.1)
    assert (found.precision, found.gradient_checkpointing, found.std_epsilon) == ("bf16", True, 1e-4)
    assert (found.ratio_to, found.adam_betas) == ("rollout", (0.9, 0.999))
    assert found.model_copy(update={"preset": None}) == LearnerSettings(**TRAINER_PRESETS[preset])
    assert set(TRAINER_PRESETS) == set(get_args(PresetName)) == set(PUBLISHED)


def test_what_is_written_wins_wherever_it_stands(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[trainer]\nclip_high = 0.5\npreset = "colossalchat-dapo"\nschedule = "constant"\n')
    section = load_config("trainer", TrainerSection, run_file, ["trainer.learning_rate=0.5"]).section
    assert (section.clip_high, section.schedule, section.learning_rate) == (0.5, "constant", 0.5)
    assert (section.algorithm, section.weight_decay, section.samples_dynamically) == ("dapo", 0.01, True)
    assert load_config("trainer", TrainerSection, run_file, ["trainer.preset=colossalchat-rloo"]).section.algorithm == (
        "rloo"
    )


@pytest.mark.parametrize("preset", ["colossalchat", ["colossalchat-grpo"]])
def test_another_name_is_refused_with_the_list(preset: Any) -> None:
    with pytest.raises(ValidationError, match=r"preset\n.*'colossalchat-grpo', .* or 'colossalchat-rloo'"):
        LearnerSettings(preset=preset)


def test_its_cosine_without_an_end_is_refused_before_the_start(model_path: Path, tmp_path: Path) -> None:
    words = [f"model.path={model_path}", f"run.folder={tmp_path}", "trainer.preset=colossalchat-grpo"]
    with pytest.raises(ConfigError, match=r"a cosine over 0 steps .* set trainer\.schedule_steps or run\.max_steps"):
        preflight(load_config("trainer", TrainerSection, None, words))
    assert preflight(load_config("trainer", TrainerSection, None, [*words, "run.max_steps=5"]))["algorithm"] == "grpo"
