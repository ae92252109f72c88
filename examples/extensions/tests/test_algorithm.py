"""`best_of_group` in the trainer: its entry point, its advantages compared with ones computed by hand, its gradient."""

import pytest
import torch

from quartet_common.config import ConfigError, load_config
from quartet_trainer.algorithms import Algorithm, Scored
from quartet_trainer.config import TrainerSection


def algorithm(*more: str) -> Algorithm:
    overrides = ["trainer.algorithm=best_of_group", *more]
    return load_config("trainer", TrainerSection, overrides=overrides).section.algorithm


def scored() -> Scored:
    """Three groups: one best, two best, all equal; the third completion of the first has two tokens."""
    rewards = torch.tensor([0.0, 0.2, 1.0, 0.5, 0.5, 0.1, 0.3, 0.3], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    rows = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6, 7])
    return Scored(rewards, groups, rows, torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [([], [0, 0, 1, 1, 1, 1, 0, 0, 0]), (["trainer.algorithm.margin=0.8"], [0, 1, 1, 1, 0, 0, 0, 0, 0])],
)
def test_only_the_best_of_a_group_count(parameters, expected):
    assert algorithm(*parameters).advantages(scored()).advantages.tolist() == expected


def test_its_gradient_raises_the_log_probs_of_the_best_alone():
    advantages = algorithm().advantages(scored()).advantages
    log_probs = torch.full((9,), -1.0, dtype=torch.float64, requires_grad=True)
    losses = algorithm().policy_loss(log_probs, log_probs.detach(), advantages, scored().rows)
    losses.loss.sum().backward()
    assert torch.equal(-log_probs.grad, advantages)  # at ratio 1 the gradient of -ratio * A is -A


def test_a_name_that_no_package_brings_is_refused():
    with pytest.raises(ConfigError, match="no such algorithm here; allowed: 'grpo', .*'best_of_group'"):
        load_config("trainer", TrainerSection, overrides=["trainer.algorithm=best_of_grup"])
    with pytest.raises(ConfigError, match="unknown key trainer.algorithm.margin in --set"):
        load_config("trainer", TrainerSection, overrides=["trainer.algorithm.margin=1"])
