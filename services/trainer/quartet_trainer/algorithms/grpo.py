"""GRPO: rewards normalised within the group, clipped ratio (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped, compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized


def grpo(settings: LearnerSettings) -> Algorithm:
    """Token-mean by default, as TRL and verl do it today; the paper's is "sequence-mean-token-mean"."""
    return compose(
        settings,
        name="grpo",
        advantages=of_completions(lambda rewards, groups: group_normalized(rewards, groups, settings.std_epsilon)),
        policy_loss=clipped(settings),
        aggregation="token-mean",
    )
