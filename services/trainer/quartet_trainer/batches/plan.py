"""What a step computes: decided once, from the global batch, alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batches.experience import ExperienceBatch
from quartet_trainer.batches.sharding import by_group, cut_alike, cut_full, shard_completions, shard_groups


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
