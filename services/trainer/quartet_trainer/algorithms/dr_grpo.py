"""Dr. GRPO: GRPO without its two biases, the division by the std and that by the length (arXiv:2503.20783)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.advantages import group_centered


def dr_grpo(settings: LearnerSettings) -> Algorithm:
    """Loss sum divided by completions * max_new_tokens, a constant."""
    return Algorithm(
        name="dr_grpo",
        advantages=lambda batch: batch.per_token(group_centered(batch.rewards, batch.groups)),
        policy_loss=clipped(settings),
        aggregation=settings.aggregation or "constant",
        mask_truncated=bool(settings.mask_truncated),
    )
