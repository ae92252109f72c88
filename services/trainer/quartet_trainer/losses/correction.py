"""Corrections for tokens that were drawn from another policy than the trainer's old one.

All are factors of a token's loss, without gradient, made of w = exp(old_log_probs - rollout_log_probs); float, the
shape of their arguments. A dropped token has factor 0 and still counts in the denominators of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.losses.policy import LOG_RATIO_BOUND, importance_ratio


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
