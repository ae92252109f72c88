"""Parts that algorithms share, parameterized by the settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from quartet_trainer.algorithms.base import AdvantageEstimator, Algorithm, Correction, Estimate, PolicyLoss, Scored
from quartet_trainer.algorithms.losses import (
    clipped_ratio_loss,
    masked_importance_weight,
    masked_sequence_weight,
    truncated_importance_weight,
)
from quartet_trainer.learner_settings import AggregationName, LearnerSettings


def compose(
    settings: LearnerSettings,
    *,
    name: str,
    advantages: AdvantageEstimator,
    policy_loss: PolicyLoss,
    aggregation: AggregationName,
    kl_estimator: str = "k3",
    kl_in: str = "loss",
    mask_truncated: bool = False,
    reward_clip: float = 0.0,
    max_mean_ratio: float = 0.0,
    has_critic: bool = False,
) -> Algorithm:
    """Create an algorithm. `aggregation` to `max_mean_ratio` are defaults, which the settings override."""

    def chosen(own: Any, default: Any) -> Any:
        return default if own is None else own

    return Algorithm(
        name=name,
        advantages=advantages,
        policy_loss=policy_loss,
        aggregation=chosen(settings.aggregation, aggregation),
        kl_estimator=chosen(settings.kl_estimator, kl_estimator),
        kl_in=chosen(settings.kl_in, kl_in),
        correction=correction(settings),
        mask_truncated=chosen(settings.mask_truncated, mask_truncated),
        reward_clip=chosen(settings.reward_clip, reward_clip),
        max_mean_ratio=chosen(settings.max_mean_ratio, max_mean_ratio),
        has_critic=has_critic,
    )


def of_completions(estimate: Callable[[Tensor, Tensor], Tensor]) -> AdvantageEstimator:
    """Give every token its completion's advantage, which `estimate` computes [N] from rewards [N] and groups [N]."""

    def advantages(scored: Scored) -> Estimate:
        return Estimate(estimate(scored.net_rewards(), scored.groups)[scored.rows])

    return advantages


def clipped(settings: LearnerSettings, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """PPO's clipped ratio; the bounds are defaults."""
    bounds = ratio_bounds(settings, clip_low, clip_high)

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: Tensor) -> Any:
        return clipped_ratio_loss(log_probs, old_log_probs, advantages, **bounds)

    return loss


def ratio_bounds(settings: LearnerSettings, clip_low: float, clip_high: float) -> dict[str, float]:
    """`clip_low`, `clip_high` and `dual_clip` of a clipped loss; the bounds are defaults."""
    return {
        "clip_low": clip_low if settings.clip_low is None else settings.clip_low,
        "clip_high": clip_high if settings.clip_high is None else settings.clip_high,
        "dual_clip": settings.dual_clip,
    }


def correction(settings: LearnerSettings) -> Correction | None:
    """The correction for the difference between the trainer's old policy and the rollout's; None: none."""
    if settings.ratio_to == "rollout" or settings.correction == "none":
        return None
    if settings.correction == "sequence-mask":
        geometric = settings.sequence_mask_mean == "geometric"
        return partial(masked_sequence_weight, cap=settings.sequence_mask_cap, geometric=geometric)
    if settings.correction == "icepop":
        low, high = settings.icepop_range
        return lambda old, rollout, sequences: masked_importance_weight(old, rollout, low, high)
    if settings.tis_cap == 0:
        return None
    return lambda old, rollout, sequences: truncated_importance_weight(old, rollout, settings.tis_cap)
