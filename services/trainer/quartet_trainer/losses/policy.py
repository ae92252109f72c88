"""The policy loss of each token.

Shapes: t trained tokens of a micro-batch, which holds whole completions only. All losses take `log_probs` float [t]
with gradient, `old_log_probs` and `advantages` float [t] without.
"""

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
    """bool [t]: the lower bound acted on the gradient (ratio below it; for most losses, negative advantage)."""
    clipped_high: Tensor
    """bool [t]: an upper bound acted on the gradient (ratio above it; for most losses, positive advantage)."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs), the exponent held within +-20 so that it stays finite."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean of `values` [t] over each completion, given to each of its tokens [t]; `sequences` int64 [t]."""
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    tokens = torch.bincount(sequences, minlength=count).to(values).clamp(min=1)
    return (values.new_zeros(count).index_add(0, sequences, values) / tokens)[sequences]


def clipped_ratio_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLosses:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with `ratio = exp(log_probs - old_log_probs)`.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347); unequal bounds are DAPO's clip-higher (Yu et al. 2025,
    arXiv:2503.14476); `dual_clip` bounds it by c * A where A < 0 (Ye et al. 2020, arXiv:1912.09729).

    Args:
        log_probs, old_log_probs, advantages: float [t].
        clip_low: in [0, 1].
        clip_high: >= 0.
        dual_clip: c > 1; 0: none.
    """
    return _clipped(importance_ratio(log_probs, old_log_probs), advantages, clip_low, clip_high, dual_clip)


def sequence_ratio_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLosses:
    """The clipped surrogate of one ratio a completion, exp(mean over its tokens of log_probs - old_log_probs).

    GSPO (Zheng et al. 2025, arXiv:2507.18071), in its token form: each token has the completion's ratio as value and
    the gradient of its own log-prob, so that the mean over a completion is the paper's loss, and tokens may differ in
    their advantages.
    """
    mean = sequence_mean((log_probs - old_log_probs).detach(), sequences)
    exponent = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + (log_probs - log_probs.detach())
    return _clipped(exponent.exp(), advantages, clip_low, clip_high, dual_clip)


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float | None, clip_high: float
) -> TokenLosses:
    """-clip(ratio) * A * log_prob, the clipped ratio without gradient: no token loses its gradient, it is bounded.

    CISPO (MiniMax 2025, arXiv:2506.13585).

    Args:
        log_probs, old_log_probs, advantages: float [t].
        clip_low: the ratio is held above 1 - clip_low; None: it has no lower bound.
        clip_high: the ratio is held below 1 + clip_high.
    """
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    loss = -ratio.clamp(lowest, 1 + clip_high) * advantages * log_probs
    return TokenLosses(loss=loss, ratio=ratio, clipped_low=ratio < lowest, clipped_high=ratio > 1 + clip_high)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float) -> TokenLosses:
    seen = ratio.detach()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped_high = (seen > 1 + clip_high) & (advantages > 0)
    if dual_clip:
        bounded = (advantages < 0) & (seen > dual_clip)
        surrogate = torch.where(bounded, dual_clip * advantages, surrogate)
        clipped_high = clipped_high | bounded
    return TokenLosses(
        loss=-surrogate,
        ratio=seen,
        clipped_low=(seen < 1 - clip_low) & (advantages < 0),
        clipped_high=clipped_high,
    )
