"""Plans which rows a step computes, on which rank and in which micro-batches."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batch.decode import ExperienceBatch

ENOUGH_TOKENS = 512
"""Micro-batches up to this size are not divided to save padding: the overhead of another pass would be larger."""


def shard_rows(longest_first: np.ndarray, world_size: int) -> np.ndarray:
    """The rank of each row: assigned in alternating order of ranks, so that their tokens are nearly equal."""
    rounds, seats = np.divmod(np.arange(longest_first.size), world_size)
    return np.where(rounds % 2 == 0, seats, world_size - 1 - seats)


def shard_prompts(
    chosen: np.ndarray, prompts: np.ndarray, prompt_lengths: np.ndarray, completion_lengths: np.ndarray, world_size: int
) -> np.ndarray:
    """The rank of each row, if a rank computes a prompt once for all its rows.

    The rows of a prompt are assigned together, the most tokens first, to the rank with the fewest tokens; or singly, if
    that leaves the busiest rank with fewer tokens, as with few prompts, or completions much longer than their prompts.

    Args:
        chosen: int64 [n]: rows, longest first.
        prompts, prompt_lengths, completion_lengths: int64 [N], of all rows.
        world_size: ranks.
    """
    singly = shard_rows(chosen, world_size)
    if world_size == 1:
        return singly
    names, first, prompt = np.unique(prompts[chosen], return_index=True, return_inverse=True)
    tokens = np.bincount(prompt, weights=completion_lengths[chosen]) + prompt_lengths[chosen[first]]
    loads = [(0.0, rank) for rank in range(world_size)]
    rank_of = np.empty(names.size, dtype=np.int64)
    for one in np.argsort(-tokens, kind="stable"):
        load, rank_of[one] = heapq.heappop(loads)
        heapq.heappush(loads, (load + tokens[one], int(rank_of[one])))
    alone = np.bincount(singly, weights=completion_lengths[chosen], minlength=world_size)
    seen = np.unique(np.stack([singly, prompt]), axis=1)
    alone += np.bincount(seen[0], weights=prompt_lengths[chosen[first]][seen[1]], minlength=world_size)
    return singly if alone.max(initial=0.0) < max(load for load, _ in loads) else rank_of[prompt]


def sort_by_prompt(longest_first: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Order rows by prompt; prompts, and rows of each, longest first."""
    _, first, prompt = np.unique(prompts[longest_first], return_index=True, return_inverse=True)
    return longest_first[np.argsort(first[prompt], kind="stable")]


def split_padded(
    longest_first: np.ndarray, lengths: np.ndarray, max_padding: float, tokens: int | None = None
) -> list[np.ndarray]:
    """Divide sequences of decreasing length into parts, each to be padded to the length of its first sequence.

    Args:
        longest_first: int64 [n]: the sequences.
        lengths: int64: of all sequences.
        max_padding: maximum share of padding in parts of more than `ENOUGH_TOKENS`.
        tokens: maximum tokens of a part, padding included; a longer sequence is alone. None: no limit.
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


def split_packed(chosen: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Divide sequences into parts of at most so many tokens; a longer sequence is alone."""
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
    """bool [T]: the trained tokens."""
    weights: Tensor
    """float64 [T]: the weight of each token's loss; 0 outside `mask`."""
    advantages: Tensor
    """float64 [T]."""
    needed: Tensor
    """bool [N]: rows that some rank computes."""
    micro_batches: list[np.ndarray]
    """This rank's rows (int64 indices), one array per forward pass; never empty, see `idle`."""
    idle: bool
    """This rank has no rows: its only micro-batch has weight 0, so that it takes part in collectives."""
    share_prompts: bool
    """A micro-batch has each prompt once. The rows of a prompt are then consecutive in it."""
    max_padding: float
    """As given to `plan_step`."""
    old_log_probs: Tensor | None = None
    """float64 [T]: the ratio's denominator; None if it is the rollout's log-probs, or those of the same pass."""


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
    """Choose the rows to compute, distribute them over the ranks, and divide this rank's into micro-batches.

    Args:
        batch: the global batch.
        mask, weights, advantages: [T] as in `StepPlan`.
        skip_zero_advantage: skip rows whose every trained token has advantage 0. Weights, and so the gradient,
            do not change.
        micro_batch_tokens: maximum tokens of a micro-batch, padding included; a longer row is alone. With shared
            prompts, a prompt counts once for each row.
        max_padding: maximum share of padding in micro-batches of more than `ENOUGH_TOKENS`; with shared prompts, in the
            blocks of the attention.
        rank, world_size: this rank's index among the data-parallel ranks, and their number.
        share_prompts: see `StepPlan`.
    """
    counts = mask & (advantages != 0) if skip_zero_advantage else mask
    needed = torch.zeros(batch.prompts.numel(), dtype=torch.bool)
    needed[batch.rows[counts]] = True

    lengths = (batch.prompt_lengths + batch.completion_lengths).numpy()
    chosen = np.flatnonzero(needed.numpy())
    longest_first = chosen[np.argsort(-lengths[chosen], kind="stable")]
    if share_prompts:
        prompts = batch.prompts.numpy()
        rank_of = shard_prompts(
            longest_first, prompts, batch.prompt_lengths.numpy(), batch.completion_lengths.numpy(), world_size
        )
        share = sort_by_prompt(longest_first[rank_of == rank], prompts)
    else:
        share = longest_first[shard_rows(longest_first, world_size) == rank]
    idle = share.size == 0
    if idle:
        share = np.array([int(lengths.argmin())])
    if share_prompts:
        micro_batches = split_packed(share, lengths, micro_batch_tokens)
    else:
        micro_batches = split_padded(share, lengths, max_padding, micro_batch_tokens)
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
