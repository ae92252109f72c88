"""What a step computes: decided once, from the global batch, alike on every rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batch.decode import ExperienceBatch

ENOUGH_TOKENS = 512
"""Tokens from which a forward pass is worth its overhead: smaller ones are not cut to spare padding."""


def shard_completions(longest_first: np.ndarray, world_size: int) -> np.ndarray:
    """The rank of each completion: dealt to and fro, so that the ranks' tokens are nearly even."""
    rounds, seats = np.divmod(np.arange(longest_first.size), world_size)
    return np.where(rounds % 2 == 0, seats, world_size - 1 - seats)


def shard_groups(
    chosen: np.ndarray, groups: np.ndarray, prompt_lengths: np.ndarray, completion_lengths: np.ndarray, world_size: int
) -> np.ndarray:
    """The rank of each completion, where a rank computes a prompt once for all completions that it has of a group.

    Whole groups, the largest first and each to the rank with least to do; or single completions, where that leaves the
    busiest rank with fewer tokens: with few groups, or completions much longer than their prompts.

    Args:
        chosen: int64 [n]: completions, longest first.
        groups, prompt_lengths, completion_lengths: int64 [N], of all completions.
        world_size: ranks.
    """
    singly = shard_completions(chosen, world_size)
    if world_size == 1:
        return singly
    names, first, group = np.unique(groups[chosen], return_index=True, return_inverse=True)
    tokens = np.bincount(group, weights=completion_lengths[chosen]) + prompt_lengths[chosen[first]]
    loads = [(0.0, rank) for rank in range(world_size)]
    rank_of = np.empty(names.size, dtype=np.int64)
    for one in np.argsort(-tokens, kind="stable"):
        load, rank_of[one] = heapq.heappop(loads)
        heapq.heappush(loads, (load + tokens[one], int(rank_of[one])))
    alone = np.bincount(singly, weights=completion_lengths[chosen], minlength=world_size)
    seen = np.unique(np.stack([singly, group]), axis=1)
    alone += np.bincount(seen[0], weights=prompt_lengths[chosen[first]][seen[1]], minlength=world_size)
    return singly if alone.max(initial=0.0) < max(load for load, _ in loads) else rank_of[group]


def by_group(longest_first: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The completions of a group one after another; groups, and completions within them, longest first."""
    _, first, group = np.unique(groups[longest_first], return_index=True, return_inverse=True)
    return longest_first[np.argsort(first[group], kind="stable")]


def cut_alike(
    longest_first: np.ndarray, lengths: np.ndarray, max_padding: float, tokens: int | None = None
) -> list[np.ndarray]:
    """Consecutive sequences of falling length, to be padded to the first of each part.

    Args:
        longest_first: int64 [n]: which sequences.
        lengths: int64, of all.
        max_padding: share of padding above which a part of `ENOUGH_TOKENS` ends.
        tokens: most of a part, padding included; a longer sequence is alone. None: any number.
    """
    parts, begin = [], 0
    while begin < longest_first.size:
        rest = lengths[longest_first[begin:]]
        padded = rest[0] * np.arange(1, rest.size + 1)
        padding = 1 - np.cumsum(rest) / np.maximum(padded, 1)
        fits = (padding <= max_padding) | (padded <= ENOUGH_TOKENS)
        if tokens is not None:
            fits &= padded <= tokens
        count = max(1, rest.size if fits.all() else int(fits.argmin()))
        parts.append(longest_first[begin : begin + count])
        begin += count
    return parts


def cut_full(chosen: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Consecutive sequences with at most so many tokens together; a longer one is alone."""
    parts, begin = [], 0
    while begin < chosen.size:
        fits = np.cumsum(lengths[chosen[begin:]]) <= tokens
        count = max(1, fits.size if fits.all() else int(fits.argmin()))
        parts.append(chosen[begin : begin + count])
        begin += count
    return parts


@dataclass(frozen=True)
class StepPlan:
    """A rank's share of an optimizer step."""

    mask: Tensor
    """bool [T]: the tokens that count in the loss."""
    weights: Tensor
    """float64 [T]: the weight of each token's loss; 0 outside `mask`."""
    advantages: Tensor
    """float64 [T]."""
    needed: Tensor
    """bool [N]: completions that some rank passes through the model."""
    micro_batches: list[np.ndarray]
    """This rank's completions (int64 indices), one array a forward pass; never empty, see `idle`."""
    idle: bool
    """This rank has no work of its own: its one micro-batch is a stand-in, of weight 0, for the gradient exchange."""
    share_prompts: bool
    """A micro-batch has each prompt once; then the completions of a group follow one another in it."""
    max_padding: float
    """As given to `plan_step`."""
    old_log_probs: Tensor | None = None
    """float64 [T]: what the ratio is taken to, where that is neither the rollout's nor those of the same pass."""


def plan_step(
    batch: ExperienceBatch,
    *,
    mask: Tensor,
    weights: Tensor,
    advantages: Tensor,
    skip_zero_advantage: bool,
    micro_batch_tokens: int,
    max_padding: float,
    rank: int,
    world_size: int,
    share_prompts: bool = False,
) -> StepPlan:
    """Choose the completions to compute, deal them out to the ranks, and cut this rank's into micro-batches.

    Args:
        batch: the global batch.
        mask, weights, advantages: [T] as in `StepPlan`.
        skip_zero_advantage: leave out completions of which every trained token has advantage 0. The weights stay as
            they are, so the gradient does too.
        micro_batch_tokens: most tokens of a micro-batch, padding included; a longer completion is alone in its own.
            With shared prompts, a prompt counts for each of its completions, as attention sees it.
        max_padding: share of padding above which a micro-batch of `ENOUGH_TOKENS` ends; with shared prompts, what
            attention takes at once of a micro-batch.
        rank, world_size: this rank's place among the data-parallel ranks.
        share_prompts: see `StepPlan`.
    """
    counts = mask & (advantages != 0) if skip_zero_advantage else mask
    needed = torch.zeros(batch.completions, dtype=torch.bool)
    needed[batch.rows[counts]] = True

    lengths = (batch.prompt_lengths + batch.completion_lengths).numpy()
    chosen = np.flatnonzero(needed.numpy())
    longest_first = chosen[np.argsort(-lengths[chosen], kind="stable")]
    if share_prompts:
        groups = batch.groups.numpy()
        dealt_to = shard_groups(
            longest_first, groups, batch.prompt_lengths.numpy(), batch.completion_lengths.numpy(), world_size
        )
        share = by_group(longest_first[dealt_to == rank], groups)
    else:
        share = longest_first[shard_completions(longest_first, world_size) == rank]
    idle = share.size == 0
    if idle:
        share = np.array([int(lengths.argmin())])
    if share_prompts:
        micro_batches = cut_full(share, lengths, micro_batch_tokens)
    else:
        micro_batches = cut_alike(share, lengths, max_padding, micro_batch_tokens)
    return StepPlan(
        mask=mask,
        weights=weights,
        advantages=advantages,
        needed=needed,
        micro_batches=micro_batches,
        idle=idle,
        share_prompts=share_prompts,
        max_padding=max_padding,
    )
