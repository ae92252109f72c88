"""GRPO: rewards normalised within the group, clipped ratio (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized


def grpo(settings: LearnerSettings) -> Algorithm:
    """Token-mean by default, as TRL and verl do it today; the paper's is "sequence-mean-token-mean"."""
    return Algorithm(
        name="grpo",
        advantages=lambda batch: batch.per_token(group_normalized(batch.rewards, batch.groups, settings.std_epsilon)),
        policy_loss=clipped(settings),
        aggregation=settings.aggregation or "token-mean",
        mask_truncated=bool(settings.mask_truncated),
    )
