"""Learning rates by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learner_helpers import settings

from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.optimizer import LearningRate
from quartet_trainer.learner_settings import check_schedule

LINEAR = {"schedule": "linear", "warmup_steps": 2, "min_learning_rate_ratio": 0.2}
COSINE = {"schedule": "cosine", "warmup_steps": 2, "min_learning_rate_ratio": 0.1}


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({}, {0: 1.0, 500: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 500: 1.0}),
        (LINEAR, {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.9, 6: 0.6, 10: 0.2, 11: 0.2, 500: 0.2}),
        (COSINE, {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1, 11: 0.1, 500: 0.1}),  # 6: half-way
        ({"schedule": "cosine", "schedule_steps": 5}, {0: 1.0, 5: 0.1, 10: 0.1}),
    ],
    ids=str,
)
def test_schedule_equals_values_by_hand(values: dict[str, Any], rates: dict[int, float]) -> None:
    rate = LearningRate(settings(learning_rate=1.0, **values), max_steps=10)
    assert {step: rate(step) for step in rates} == pytest.approx(rates)
    falling = [rate(step) for step in range(values.get("warmup_steps", 0), 13)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_needs_an_end(schedule: str) -> None:
    message = rf"a {schedule} over 0 steps with 0 steps of warm-up .* set trainer\.schedule_steps or run\.max_steps"
    with pytest.raises(LearnerError, match=message):
        LearningRate(settings(schedule=schedule), max_steps=0)


FILE = """
def falling(step, steps): return 1 - step / steps
def alone(step): return 0.5 ** step
def below(step): return -1
def imports(step): import sklearn
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "schedule.py").write_text(FILE)
    return tmp_path / "schedule.py"


def test_a_function_of_a_file_gives_the_factor_after_the_warm_up(file: Path) -> None:
    rate = LearningRate(settings(learning_rate=2.0, schedule=f"{file}:falling", warmup_steps=2), max_steps=10)
    assert [rate(step) for step in (0, 1, 2, 5, 9)] == pytest.approx([1.0, 2.0, 1.6, 1.0, 0.2])
    assert LearningRate(settings(learning_rate=2.0, schedule=f"{file}:alone"), max_steps=0)(3) == 0.25


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "schedule.py' has no function 'gone'; it has: falling, alone, below, imports"),
        ("below", "schedule.py:below' returned -1.0 for step 0; allowed: 0 or above"),
        ("imports", r"No module named 'sklearn'; if it is a package, install it: .* scikit-learn \(.*schedule.py:5\)"),
    ],
)
def test_a_function_that_gives_no_rate_is_refused_before_the_start(file: Path, name: str, sentence: str) -> None:
    with pytest.raises(LearnerError, match=f"trainer.schedule: .*{sentence}"):
        check_schedule(settings(schedule=f"{file}:{name}"), max_steps=10)


def test_a_schedule_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="allowed: constant, cosine, linear, or a function of a Python file"):
        settings(schedule="cosinus")
