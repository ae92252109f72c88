"""Estimators of a KL divergence from the log-probs of sampled tokens (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.losses.policy import LOG_RATIO_BOUND


def k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """e^d - d - 1 with d = other_log_probs - log_probs, per token: never negative, and unbiased for
    KL(policy || other) on tokens drawn from the policy. float, the shape of its arguments; |d| is held to 20."""
    difference = (other_log_probs - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps the digits where the two policies nearly agree.
    return difference.expm1() - difference
