"""What an algorithm is: named parts, which the learner applies in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quartet_trainer.batches.experience import ExperienceBatch
from quartet_trainer.learner.settings import AggregationName, LearnerSettings
from quartet_trainer.losses.policy import TokenLosses

AdvantageEstimator = Callable[[ExperienceBatch], Tensor]
"""From the global batch to float64 [T], the advantage of each completion token."""

PolicyLoss = Callable[[Tensor, Tensor, Tensor], TokenLosses]
"""From log_probs, old_log_probs and advantages, each float [t], to the losses of a micro-batch's t tokens."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm.

    loss = sum over tokens of weight * (correction * policy_loss + kl_coefficient * k3), where the weight is the
    aggregation's and the correction is `tis_cap`'s.
    """

    name: str
    advantages: AdvantageEstimator
    policy_loss: PolicyLoss
    aggregation: AggregationName
    mask_truncated: bool
    """Whether completions cut at the length limit are left out of the loss (they stay in their group's mean)."""


AlgorithmFactory = Callable[[LearnerSettings], Algorithm]
