"""CISPO: the importance ratio is a bounded weight without gradient, and no token is clipped away (arXiv:2506.13585)."""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized
from quartet_trainer.losses.policy import TokenLosses, clipped_weight_loss


def cispo(settings: LearnerSettings) -> Algorithm:
    """Ratios are held below 1 + clip_high (5, as in TRL) and, if `clip_low` is set, above 1 - clip_low (as in verl)."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        clip_high = 4.0 if settings.clip_high is None else settings.clip_high
        return clipped_weight_loss(log_probs, old_log_probs, advantages, settings.clip_low, clip_high)

    return compose(
        settings,
        name="cispo",
        advantages=of_completions(lambda rewards, groups: group_normalized(rewards, groups, settings.std_epsilon)),
        policy_loss=loss,
        aggregation="token-mean",
    )
