"""Token losses, and the weight of each token in the batch's loss: pure functions, each a formula and its paper.

Shapes: t trained tokens of a micro-batch, which has whole completions only; T tokens of the global batch. Policy losses
take `log_probs` float [t] with gradient, `old_log_probs` and `advantages` float [t] without.

Corrections are for tokens that were sampled from another policy than the trainer's old one. They are factors of a
token's loss, without gradient, computed from w = exp(old_log_probs - rollout_log_probs). A dropped token has factor 0
and still counts in the loss's denominator.

KL estimators (Schulman 2020, "Approximating KL divergence") take `log_probs` and `other_log_probs`, float of the same
shape, and return that shape: per token, an estimate of KL(policy || other) on tokens sampled from the policy.
Differences are clamped to +-20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# e^20 times a large advantage is still finite in float32; larger ratios carry no more information.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class TokenLosses:
    """Losses of the t tokens of a micro-batch, and which of them were clipped."""

    loss: Tensor
    """float [t], differentiable."""
    ratio: Tensor
    """float [t], detached: probability under the trained policy over that under the old one."""
    clipped_low: Tensor
    """bool [t]: the lower bound changed the gradient (ratio below it; for most losses, negative advantage)."""
    clipped_high: Tensor
    """bool [t]: an upper bound changed the gradient (ratio above it; for most losses, positive advantage)."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs), with the exponent clamped to +-20 so that it stays finite."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """For each token, the sum of `values` [t] over its completion, `sequences` int64 [t]. Returns [t]."""
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    return values.new_zeros(count).index_add(0, sequences, values)[sequences]


def sequence_counts(values: Tensor, sequences: Tensor) -> Tensor:
    """For each token, the number of its completion's tokens, [t], of the type of `values` [t]."""
    return sequence_sum(torch.ones_like(values), sequences)


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
    product: bool = False,
) -> TokenLosses:
    """The clipped surrogate with one ratio per completion, exp(mean over its tokens of log_probs - old_log_probs).

    GSPO-token (Zheng et al. 2025, arXiv:2507.18071): a token's ratio has the completion's value and the gradient of its
    own log-prob. The mean over a completion is then GSPO's loss, and tokens may have different advantages. With
    `product` the sum takes the mean's place: the ratio is that of the completion's probabilities.
    """
    difference = (log_probs - old_log_probs).detach()
    total = sequence_sum(difference, sequences)
    shared = total if product else total / sequence_counts(difference, sequences)
    exponent = shared.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + (log_probs - log_probs.detach())
    return _clipped(exponent.exp(), advantages, clip_low, clip_high, dual_clip)


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float | None, clip_high: float
) -> TokenLosses:
    """-clip(ratio) * A * log_prob, with no gradient through the ratio: every token has a gradient, a bounded one.

    CISPO (MiniMax 2025, arXiv:2506.13585).

    Args:
        log_probs, old_log_probs, advantages: float [t].
        clip_low: the ratio is at least 1 - clip_low; None: no lower bound.
        clip_high: the ratio is at most 1 + clip_high.
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

    It is the product of its tokens' w, which is exact but grows or shrinks with the length, or with `geometric` their
    geometric mean, which does not.

    Args:
        old_log_probs, rollout_log_probs: float [t], of whole completions.
        sequences: int64 [t], the completion of each token.
        cap: > 0.
        geometric: whether to take the geometric mean.
    """
    difference = (old_log_probs - rollout_log_probs).detach()
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    exponent = difference.new_zeros(count).index_add(0, sequences, difference)
    if geometric:
        exponent = exponent / torch.bincount(sequences, minlength=count).to(exponent).clamp(min=1)
    weight = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return torch.where(weight <= cap, weight, 0.0)[sequences]


def k1(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log_probs - other_log_probs: unbiased, of either sign. As a loss, its expected gradient is 0."""
    return (log_probs - other_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k2(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """k1^2 / 2: never negative, biased. As a loss, its expected gradient is that of the KL."""
    return k1(log_probs, other_log_probs) ** 2 / 2


def k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """e^d - d - 1 with d = other_log_probs - log_probs: never negative, and unbiased."""
    difference = (other_log_probs - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps precision where the two policies nearly agree.
    return difference.expm1() - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's max((V - R)^2, (V_clip - R)^2) / 2, where V_clip is V clamped to +-clip around its value before the step.

    Args:
        values: float [t], with gradient.
        old_values: float [t], without.
        returns: float [t], without.
        clip: > 0; 0: no clipping.

    Returns:
        The losses, float [t], and where clipping removed the gradient, bool [t].
    """
    loss = (values - returns) ** 2
    if not clip:
        return loss / 2, torch.zeros_like(loss, dtype=torch.bool)
    # The value is clamped, not its difference: old + (value - old) may round to another value, and count as clipped.
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(loss, bounded) / 2, (bounded > loss).detach()


def token_weights(name: str, mask: Tensor, rows: Tensor, completions: int, length: int) -> Tensor:
    """The weight of each token, float64 [T]; 0 where `mask` is 0.

    | name | the loss is |
    |---|---|
    | token-mean | the mean over all tokens of the batch (DAPO) |
    | sequence-mean-token-mean | the mean over completions of their token means (GRPO's paper) |
    | sequence-mean-token-sum | the mean over completions of their token sums |
    | constant | the sum over all tokens / (completions * length) (Dr. GRPO) |

    Completions without a trained token are not counted, except by "constant", whose divisor is fixed.

    Args:
        name: one of the above.
        mask: bool [T], the trained tokens.
        rows: int64 [T], the completion of each token.
        completions: of the batch, or of the mini-batch to which `mask` is limited; only for "constant".
        length: maximum tokens of a completion in this run; only for "constant".
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
    return trained / (completions * length)
