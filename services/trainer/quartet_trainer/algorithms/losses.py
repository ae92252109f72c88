"""The losses of tokens, and the weight of each in the batch's one number: pure functions, each a formula and its paper.

Shapes: t trained tokens of a micro-batch, which holds whole completions only; T of the global batch. Policy losses take
`log_probs` float [t] with gradient, `old_log_probs` and `advantages` float [t] without.

Corrections, for tokens that were drawn from another policy than the trainer's old one, are factors of a token's loss,
without gradient, made of w = exp(old_log_probs - rollout_log_probs). A dropped token has factor 0 and still counts in
the denominators of the loss.

KL estimators (Schulman 2020, "Approximating KL divergence") take `log_probs` and `other_log_probs`, float of any one
shape, and return that shape: per token, an estimate of KL(policy || other) on tokens drawn from the policy. Differences
are held to 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet_trainer.learner_settings import AggregationName

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


def truncated_importance_weight(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """min(w, cap) per token: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training")."""
    return importance_ratio(old_log_probs, rollout_log_probs).detach().clamp(max=cap)


def masked_importance_weight(old_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> Tensor:
    """w where low <= w <= high, else 0, per token: IcePop (Ling team 2025, arXiv:2510.18855)."""
    weight = importance_ratio(old_log_probs, rollout_log_probs).detach()
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def masked_sequence_weight(
    old_log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor, cap: float, geometric: bool
) -> Tensor:
    """The w of a whole completion where it is at most `cap`, else 0: masked importance sampling of sequences.

    It is the product of its tokens' w, which is exact and shrinks or grows with the length, or with `geometric` their
    geometric mean, which does not.

    Args:
        old_log_probs, rollout_log_probs: float [t], whole completions.
        sequences: int64 [t], the completion of each token.
        cap: > 0.
        geometric: which of the two.
    """
    difference = (old_log_probs - rollout_log_probs).detach()
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    exponent = difference.new_zeros(count).index_add(0, sequences, difference)
    if geometric:
        exponent = exponent / torch.bincount(sequences, minlength=count).to(exponent).clamp(min=1)
    weight = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return torch.where(weight <= cap, weight, 0.0)[sequences]


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


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_clip - R)^2) / 2, where V_clip is V held within +-clip of its value before the step: PPO's.

    Args:
        values: float [t], with gradient.
        old_values: float [t], without.
        returns: float [t], without.
        clip: > 0; 0: no clipping.

    Returns:
        The losses, float [t], and where the bound took the gradient away, bool [t].
    """
    loss = (values - returns) ** 2
    if not clip:
        return loss / 2, torch.zeros_like(loss, dtype=torch.bool)
    # The value itself is held: old + (value - old) may differ from it by rounding, and would count as bounded.
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(loss, bounded) / 2, (bounded > loss).detach()


def token_weights(name: AggregationName, mask: Tensor, rows: Tensor, completions: int, length: int) -> Tensor:
    """The weight of each token, float64 [T]; 0 where `mask` is 0.

    | name | the loss is |
    |---|---|
    | token-mean | the mean over all tokens of the batch (DAPO) |
    | sequence-mean-token-mean | the mean over completions of their token means (GRPO's paper) |
    | sequence-mean-token-sum | the mean over completions of their token sums |
    | constant | the sum over all tokens / (completions * length) (Dr. GRPO) |

    Completions without any unmasked token are not counted, except by "constant", whose divisor never varies.

    Args:
        name: one of the above.
        mask: bool [T], the tokens that are trained.
        rows: int64 [T], the completion of each token.
        completions: how many the batch has, or the mini-batch whose tokens `mask` leaves; used by "constant" alone.
        length: longest completion the run allows, in tokens; used by "constant" alone.
    """
    trained = mask.double()
    tokens = torch.zeros(int(rows.max()) + 1 if rows.numel() else 0, dtype=torch.float64).index_add_(0, rows, trained)
    counted = (tokens > 0).sum().clamp(min=1)
    if name == "token-mean":
        return trained / tokens.sum().clamp(min=1)
    if name == "sequence-mean-token-mean":
        return trained / (tokens.clamp(min=1)[rows] * counted)
    if name == "sequence-mean-token-sum":
        return trained / counted
    if name == "constant":
        return trained / (completions * length)
    raise ValueError(f"aggregation: got {name!r}")
