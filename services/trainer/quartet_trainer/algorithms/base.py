"""What an algorithm is: named parts, which the learner applies in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quartet_trainer.algorithms.losses import TokenLosses
from quartet_trainer.learner_settings import AggregationName, LearnerSettings


@dataclass(frozen=True)
class Scored:
    """A global batch as an advantage estimator sees it: N completions, T completion tokens, alike on every rank."""

    rewards: Tensor
    """float64 [N], clipped where the algorithm does so."""
    groups: Tensor
    """int64 [N]: the group of each completion."""
    rows: Tensor
    """int64 [T]: the completion of each token, never falling."""
    mask: Tensor
    """bool [T]: the trained tokens."""
    kl_penalty: Tensor
    """float64 [T]: kl_coefficient * KL where the KL is taken from the reward; else 0. 0 outside the mask."""
    values: Tensor | None = None
    """float64 [T]: the critic's, of the state in which the token was chosen."""

    def net_rewards(self) -> Tensor:
        """Rewards less the KL penalties of their completions' tokens, float64 [N]."""
        return self.rewards - torch.zeros_like(self.rewards).index_add_(0, self.rows, self.kl_penalty)


@dataclass(frozen=True)
class Estimate:
    """What an estimator makes of it."""

    advantages: Tensor
    """float64 [T]; outside the mask, any."""
    returns: Tensor | None = None
    """float64 [T]: what the critic is to learn."""


AdvantageEstimator = Callable[[Scored], Estimate]

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLosses]
"""From log_probs, old_log_probs, advantages, each float [t], and sequences int64 [t], the completion of each token, to
the losses of a micro-batch's t tokens."""

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From old and rollout log-probs, float [t], and sequences int64 [t], to a factor of each token's loss."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm.

    loss = sum over tokens of weight * (correction * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy),
    where the weight is the aggregation's and the KL may be taken from the reward instead.
    """

    name: str
    advantages: AdvantageEstimator
    policy_loss: PolicyLoss
    aggregation: AggregationName
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["loss", "reward"]
    correction: Correction | None
    """None where old log-probs are the rollout's, or no correction is wanted."""
    mask_truncated: bool
    """Whether completions cut at the length limit are left out of the loss (they stay in their group's mean)."""
    reward_clip: float
    """Rewards are held within +- this; 0: as they are."""
    max_mean_ratio: float
    """Mean ratio above which a batch changes no weight; 0: none."""
    has_critic: bool
    """Whether the estimator wants values, and gives returns."""


AlgorithmFactory = Callable[[LearnerSettings], Algorithm]
