"""Dr. GRPO: GRPO without its two biases, the division by the std and that by the length (arXiv:2503.20783)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped, compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_centered


def dr_grpo(settings: LearnerSettings) -> Algorithm:
    """Loss sum divided by completions * max_new_tokens, a constant."""
    return compose(
        settings,
        name="dr_grpo",
        advantages=of_completions(group_centered),
        policy_loss=clipped(settings),
        aggregation="constant",
    )
