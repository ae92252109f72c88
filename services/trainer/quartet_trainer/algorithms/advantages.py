"""Advantages from rewards: pure functions, each a formula and its paper. N completions of B groups, T tokens in all.

Functions of completions take `rewards` float [N] and `groups` int64 [N], each completion's group, from 0. They return
float64 [N]. A group with one completion, or with equal rewards, has advantage 0 exactly, without rounding errors.

Functions of tokens take them flat, one completion after another: `rows` int64 [T], each token's completion, not
decreasing; `mask` bool [T], true for trained tokens. Other tokens are skipped: a trained token's successor is the next
trained token of its completion. They return float64 [T], 0 outside the mask.
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
    rewards, mean = rewards.double(), group_mean(rewards, groups)
    lowest = torch.full_like(mean, torch.inf).scatter_reduce_(0, groups, rewards, "amin")
    highest = torch.full_like(mean, -torch.inf).scatter_reduce_(0, groups, rewards, "amax")
    varies = highest > lowest
    return torch.where(varies[groups], rewards - mean[groups], 0.0)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group's others = G / (G - 1) * (r - mean): RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""
    sizes = torch.bincount(groups).double()
    return group_centered(rewards, groups) * (sizes / (sizes - 1).clamp(min=1))[groups]


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """Mean of each group's rewards, float64 [B]."""
    sizes = torch.bincount(groups).double()
    return torch.zeros_like(sizes).index_add_(0, groups, rewards.double()) / sizes


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, float64 [B]; 0 for a group of one."""
    sizes = torch.bincount(groups).double()
    squares = torch.zeros_like(sizes).index_add_(0, groups, group_centered(rewards, groups) ** 2)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()


def same_position(groups: Tensor, indices: Tensor) -> Tensor:
    """Number the pairs of group and position, both int64 [U], from 0."""
    return torch.unique(torch.stack([groups, indices]), dim=1, return_inverse=True)[1]


def token_rewards(rewards: Tensor, penalties: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """-penalty at every trained token, plus the completion's reward at its last one; `rewards` [N], `penalties` [T]."""
    given = torch.where(mask, -penalties.double(), 0.0)
    places = torch.nonzero(mask).squeeze(-1)
    last = torch.full((rewards.numel(),), -1).scatter_reduce_(0, rows[places], places, "amax")
    completions = torch.nonzero(last >= 0).squeeze(-1)
    given[last[completions]] += rewards.double()[completions]
    return given


def returns_to_go(rewards: Tensor, mask: Tensor, rows: Tensor, gamma: float) -> Tensor:
    """The sum of this token's and all later rewards, discounted by gamma per token: REINFORCE."""
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, rows, gamma, 1.0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, rows: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t; V and A are 0 after the end.

    Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    Args:
        rewards: [T], of tokens.
        values: [T], the critic's value of the state in which the token was chosen.
        mask, rows: as above.
        gamma, gae_lambda: in [0, 1].
    """
    places = torch.nonzero(mask).squeeze(-1)
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    if not places.numel():
        return advantages
    # One row per completion, with its trained tokens at the left: the recursion loops over columns, not tokens.
    _, line, lengths = torch.unique_consecutive(rows[places], return_inverse=True, return_counts=True)
    column = torch.arange(places.numel()) - (lengths.cumsum(0) - lengths)[line]
    reward, value = (torch.zeros(lengths.numel(), int(lengths.max()) + 1, dtype=torch.float64) for _ in range(2))
    reward[line, column] = rewards[places].double()
    value[line, column] = values[places].double()
    delta = reward[:, :-1] + gamma * value[:, 1:] - value[:, :-1]
    for index in range(delta.shape[1] - 2, -1, -1):
        delta[:, index] += gamma * gae_lambda * delta[:, index + 1]
    advantages[places] = delta[line, column]
    return advantages


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the trained tokens, unbiased variance; 0 where all are equal."""
    trained = values[mask].double()
    result = torch.zeros(mask.shape, dtype=torch.float64)
    if trained.numel() > 1 and trained.min() < trained.max():
        result[mask] = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    return result
