"""RLOO: each completion's baseline is the mean reward of the others (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped, compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import leave_one_out


def rloo(settings: LearnerSettings) -> Algorithm:
    """With the clipped ratio, and the sum over a completion's tokens: the completion is the action."""
    return compose(
        settings,
        name="rloo",
        advantages=of_completions(leave_one_out),
        policy_loss=clipped(settings),
        aggregation="sequence-mean-token-sum",
    )
