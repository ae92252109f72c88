"""The policy loss of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# e^20 is still finite when it meets a large advantage in float32; beyond it, a ratio says nothing more.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class TokenLosses:
    """Losses of the t tokens of a micro-batch and what the clipping did to them."""

    loss: Tensor
    """float [t], differentiable."""
    ratio: Tensor
    """float [t], detached: probability under the trained over the old policy."""
    clipped_low: Tensor
    """bool [t]: the lower bound took the gradient away (ratio below it, negative advantage)."""
    clipped_high: Tensor
    """bool [t]: the upper bound took the gradient away (ratio above it, positive advantage)."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs), the exponent held within +-20 so that it stays finite."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_ratio_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLosses:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with `ratio = exp(log_probs - old_log_probs)`.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347); unequal bounds are DAPO's clip-higher (Yu et al. 2025,
    arXiv:2503.14476).

    Args:
        log_probs: float [t], with gradient.
        old_log_probs: float [t], without.
        advantages: float [t].
        clip_low: in [0, 1].
        clip_high: >= 0.
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    seen = ratio.detach()
    return TokenLosses(
        loss=loss,
        ratio=seen,
        clipped_low=(seen < 1 - clip_low) & (advantages < 0),
        clipped_high=(seen > 1 + clip_high) & (advantages > 0),
    )
