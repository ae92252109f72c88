"""Corrections for tokens that were drawn from another policy than the trainer's old one."""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.losses.policy import importance_ratio


def truncated_importance_weight(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """min(exp(old - rollout), cap) per token, without gradient: truncated importance sampling (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). float, the shape of its arguments."""
    return importance_ratio(old_log_probs, rollout_log_probs).detach().clamp(max=cap)
