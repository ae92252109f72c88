"""The interface of an algorithm: parts, which the learner applies in a fixed order."""

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
    """The input of an advantage estimator: a global batch of N completions and T completion tokens."""

    rewards: Tensor
    """float64 [N], clipped if the algorithm clips them."""
    groups: Tensor
    """int64 [N]: the group of each completion."""
    rows: Tensor
    """int64 [T]: the completion of each token, not decreasing."""
    mask: Tensor
    """bool [T]: the trained tokens."""
    kl_penalty: Tensor
    """float64 [T]: kl_coefficient * KL if the KL is taken from the reward, otherwise 0; 0 outside the mask."""
    values: Tensor | None = None
    """float64 [T]: the critic's value of the state in which the token was chosen; None without a critic."""

    def net_rewards(self) -> Tensor:
        """Rewards minus the sum of their completion's KL penalties, float64 [N]."""
        return self.rewards - torch.zeros_like(self.rewards).index_add_(0, self.rows, self.kl_penalty)


@dataclass(frozen=True)
class Estimate:
    """The output of an advantage estimator."""

    advantages: Tensor
    """float64 [T]; values outside the mask are ignored."""
    returns: Tensor | None = None
    """float64 [T]: the critic's targets."""


AdvantageEstimator = Callable[[Scored], Estimate]

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLosses]
"""From log_probs, old_log_probs and advantages, each float [t], and sequences int64 [t], each token's completion, to
the losses of a micro-batch's t tokens."""

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From old and rollout log-probs, float [t], and sequences int64 [t], to a factor of each token's loss."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm.

    loss = sum over tokens of weight * (correction * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy).
    The aggregation determines the weight. With `kl_in` "reward", the KL is taken from the reward instead.
    """

    name: str
    advantages: AdvantageEstimator
    policy_loss: PolicyLoss
    aggregation: AggregationName
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["loss", "reward"]
    correction: Correction | None
    """None if old log-probs are the rollout's, or without a correction."""
    mask_truncated: bool
    """Whether truncated completions are masked in the loss; they still count in their group's mean."""
    reward_clip: float
    """Rewards are clipped to +- this; 0: no clipping."""
    max_mean_ratio: float
    """Mean ratio above which the policy's optimizer step is skipped; 0: never."""
    has_critic: bool
    """Whether the estimator needs values and returns returns."""


AlgorithmFactory = Callable[[LearnerSettings], Algorithm]
