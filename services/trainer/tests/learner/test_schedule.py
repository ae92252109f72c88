"""The linear schedule, by hand and against PyTorch's; the others are in test_settings.py."""

import pytest
import torch
from learner_helpers import settings

from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.optimizer import LearningRate


def test_linear_falls_to_its_floor_and_stays_there() -> None:
    values = {"schedule": "linear", "learning_rate": 1.0, "warmup_steps": 2, "min_learning_rate_ratio": 0.2}
    rate = LearningRate(settings(**values), max_steps=10)
    assert [rate(step) for step in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.9])
    assert [rate(step) for step in (6, 10, 11, 500)] == pytest.approx([0.6, 0.2, 0.2, 0.2])


def test_linear_is_pytorchs_without_a_warm_up() -> None:
    rate = LearningRate(settings(schedule="linear", learning_rate=3e-4, min_learning_rate_ratio=0.1), max_steps=7)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=7)
    for step in range(10):
        assert rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_linear_needs_an_end() -> None:
    with pytest.raises(LearnerError, match="a linear over 0 steps with 0 steps of warm-up has no room"):
        LearningRate(settings(schedule="linear"), max_steps=0)
