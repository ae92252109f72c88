"""Learning rates by hand."""

from __future__ import annotations

from typing import Any

import pytest
from learner_helpers import settings

from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.optimizer import LearningRate

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
def test_by_hand(values: dict[str, Any], rates: dict[int, float]) -> None:
    rate = LearningRate(settings(learning_rate=1.0, **values), max_steps=10)
    assert {step: rate(step) for step in rates} == pytest.approx(rates)
    falling = [rate(step) for step in range(values.get("warmup_steps", 0), 13)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_needs_an_end(schedule: str) -> None:
    message = rf"a {schedule} over 0 steps with 0 steps of warm-up .* set trainer\.schedule_steps or run\.max_steps"
    with pytest.raises(LearnerError, match=message):
        LearningRate(settings(schedule=schedule), max_steps=0)
