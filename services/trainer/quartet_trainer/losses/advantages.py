"""Advantages from rewards, one number a completion, each compared with its own group.

All take `rewards` float [N] and `groups` int64 [N] (the group of each completion, from 0) and return float64 [N].
A group of one completion has advantage 0: there is nothing to compare it with. So has a group of equal rewards,
exactly, whatever the rounding of its mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalized(rewards: Tensor, groups: Tensor, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon), unbiased standard deviation: GRPO (Shao et al. 2024, arXiv:2402.03300)."""
    centered = group_centered(rewards, groups)
    return centered / (group_std(rewards, groups)[groups] + epsilon)


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    rewards = rewards.double()
    sizes = torch.bincount(groups).double()
    mean = torch.zeros_like(sizes).index_add_(0, groups, rewards) / sizes
    lowest = torch.full_like(mean, torch.inf).scatter_reduce_(0, groups, rewards, "amin")
    highest = torch.full_like(mean, -torch.inf).scatter_reduce_(0, groups, rewards, "amax")
    varies = highest > lowest
    return torch.where(varies[groups], rewards - mean[groups], 0.0)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group's others = G / (G - 1) * (r - mean): RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""
    sizes = torch.bincount(groups).double()
    return group_centered(rewards, groups) * (sizes / (sizes - 1).clamp(min=1))[groups]


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, float64 [B]; 0 for a group of one."""
    sizes = torch.bincount(groups).double()
    squares = torch.zeros_like(sizes).index_add_(0, groups, group_centered(rewards, groups) ** 2)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()
