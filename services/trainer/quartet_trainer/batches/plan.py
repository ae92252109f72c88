"""What a step computes: decided once, from the global batch, alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batches.experience import ExperienceBatch

ENOUGH_TOKENS = 512
"""Tokens from which a forward pass is worth its overhead: smaller micro-batches are not cut to spare padding."""


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
) -> StepPlan:
    """Choose the completions to compute, deal them out to the ranks, and cut this rank's into micro-batches.

    Args:
        batch: the global batch.
        mask, weights, advantages: [T] as in `StepPlan`.
        skip_zero_advantage: leave out completions of which every trained token has advantage 0. The weights stay as
            they are, so the gradient does too.
        micro_batch_tokens: most tokens of a micro-batch, padding included; a longer completion is alone in its own.
        max_padding: share of padding above which a micro-batch of `ENOUGH_TOKENS` ends.
        rank, world_size: this rank's place among the data-parallel ranks.
    """
    counts = mask & (advantages != 0) if skip_zero_advantage else mask
    needed = torch.zeros(batch.completions, dtype=torch.bool)
    needed[batch.rows[counts]] = True

    lengths = (batch.prompt_lengths + batch.completion_lengths).numpy()
    chosen = np.flatnonzero(needed.numpy())
    longest_first = chosen[np.argsort(-lengths[chosen], kind="stable")]
    share = _share(longest_first, rank, world_size)
    idle = share.size == 0
    if idle:
        share = np.array([int(lengths.argmin())])
    return StepPlan(
        mask=mask,
        weights=weights,
        advantages=advantages,
        needed=needed,
        micro_batches=_cut(share, lengths, micro_batch_tokens, max_padding),
        idle=idle,
    )


def _share(longest_first: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Every world_size-th completion, dealt to and fro so that the ranks' tokens are nearly even."""
    positions = np.arange(longest_first.size)
    rounds, seats = np.divmod(positions, world_size)
    dealt_to = np.where(rounds % 2 == 0, seats, world_size - 1 - seats)
    return longest_first[dealt_to == rank]


def _cut(
    longest_first: np.ndarray, lengths: np.ndarray, micro_batch_tokens: int, max_padding: float
) -> list[np.ndarray]:
    """Consecutive completions of falling length, so that each micro-batch is as wide as its first one."""
    micro_batches = []
    begin = 0
    while begin < longest_first.size:
        rest = lengths[longest_first[begin:]]
        padded = rest[0] * np.arange(1, rest.size + 1)
        padding = 1 - np.cumsum(rest) / padded
        fits = (padded <= micro_batch_tokens) & ((padding <= max_padding) | (padded <= ENOUGH_TOKENS))
        count = max(1, rest.size if fits.all() else int(fits.argmin()))
        micro_batches.append(longest_first[begin : begin + count])
        begin += count
    return micro_batches
