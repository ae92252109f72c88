"""Estimators of a KL divergence from the log-probs of sampled tokens (Schulman 2020, "Approximating KL divergence").

Each takes `log_probs` and `other_log_probs`, float of any one shape, and returns that shape: per token, an estimate of
KL(policy || other) on tokens drawn from the policy. Differences are held to 20.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quartet_trainer.losses.policy import LOG_RATIO_BOUND


def k1(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log_probs - other_log_probs: unbiased, of either sign. As a loss its expected gradient is 0."""
    return (log_probs - other_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k2(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """k1^2 / 2: never negative, biased; as a loss its gradient is, in expectation, the KL's own."""
    return k1(log_probs, other_log_probs) ** 2 / 2


def k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """e^d - d - 1 with d = other_log_probs - log_probs: never negative, and unbiased."""
    difference = (other_log_probs - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps the digits where the two policies nearly agree.
    return difference.expm1() - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
