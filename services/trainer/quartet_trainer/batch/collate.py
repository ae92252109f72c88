"""Micro-batches: the input of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batch.decode import ExperienceBatch
from quartet_trainer.batch.planner import StepPlan
from quartet_trainer.batch.shared_prompts import Packing, share_prompts


@dataclass(frozen=True)
class MicroBatch:
    """M rows with their prompts, and their t trained tokens, flat.

    They are padded on the right to the longest (L): padding follows every real token, so a causal model needs no
    attention mask. With `packing`, there is a single row that has each prompt once.
    """

    input_ids: Tensor
    """int64 [M, L]; with `packing` [1, S]."""
    rows: Tensor
    """int64 [t]: the row of each trained token in `input_ids`."""
    columns: Tensor
    """int64 [t]: the column whose output predicts it, that of the previous token."""
    targets: Tensor
    """int64 [t]: its id."""
    sequences: Tensor
    """int64 [t]: its row in the micro-batch, in [0, M). Rows are never split."""
    tokens: Tensor
    """int64 [t]: its index among the T completion tokens of the global batch."""
    temperatures: Tensor
    """float32 [t]: the temperature that it was sampled at."""
    rollout_log_probs: Tensor
    """float32 [t]."""
    advantages: Tensor
    """float64 [t]."""
    weights: Tensor
    """float64 [t]: its weight in the batch's loss."""
    old_log_probs: Tensor | None = None
    """float64 [t]: see `StepPlan.old_log_probs`."""

    packing: Packing | None = None
    """With shared prompts: the sequences that the row's tokens belong to."""

    mask_counts: Tensor | None = None
    """int64 [t]: with sampling masks, how many candidates it was sampled from; 0: all of the vocabulary."""
    mask_ids: Tensor | None = None
    """int64 [sum of the counts]: the candidates' ids."""

    routed_experts: Tensor | None = None
    """With router replay: uint8 or int32 [elements of `input_ids`, hidden layers, experts of a token]."""

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor, Packing | None]:
        """The part of `inputs` that determines the hidden states in which the trained tokens were chosen."""
        return self.input_ids, self.rows, self.columns, self.packing

    @property
    def inputs(self) -> tuple[Tensor | Packing | None, ...]:
        """The arguments of the policy's forward pass."""
        inputs = *self.states, self.targets, self.temperatures, self.mask_counts, self.mask_ids, self.routed_experts
        given = [place for place, value in enumerate(inputs) if value is not None]
        return inputs[: given[-1] + 1]

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """Copy it to `device`, with floating-point tensors as `dtype`."""

        def move(value: Tensor | Packing | None) -> Tensor | Packing | None:
            if value is None:
                return None
            if isinstance(value, Packing):
                return value.to(device)
            return value.to(device, dtype if value.is_floating_point() else value.dtype, non_blocking=True)

        return MicroBatch(**{name: move(value) for name, value in vars(self).items()})


def collate(batch: ExperienceBatch, plan: StepPlan, rows: np.ndarray) -> MicroBatch:
    """Gather `rows` (int64 indices into the batch) for one forward pass."""
    chosen = torch.from_numpy(rows)
    completion_lengths = batch.completion_lengths[chosen]
    sequences = torch.repeat_interleave(torch.arange(chosen.numel()), completion_lengths)
    first = completion_lengths.cumsum(0) - completion_lengths
    offset = torch.arange(sequences.numel()) - first[sequences]
    token = batch.completion_starts[chosen][sequences] + offset
    trained = plan.mask[token]
    sequences, offset, token = sequences[trained], offset[trained], token[trained]
    if plan.share_prompts:
        laid = share_prompts(batch, chosen, plan.max_padding)
        source, packing, lines = laid.source, laid.packing, torch.zeros_like(sequences)
        input_ids = batch.tokens[source].long()
        columns = laid.completion_starts[sequences] + offset - 1
        columns = torch.where(offset == 0, laid.prompt_ends[sequences], columns)
    else:
        source, packing, lines = _padded(batch, chosen), None, sequences
        input_ids = torch.where(source < 0, 0, batch.tokens[source]).long()
        columns = batch.prompt_lengths[chosen][sequences] + offset - 1
    counts, ids = (None, None) if batch.candidates is None else batch.candidates.of(token)
    experts = batch.routed_experts
    return MicroBatch(
        routed_experts=None if experts is None else experts[source.flatten()],
        mask_counts=counts,
        mask_ids=ids,
        input_ids=input_ids,
        rows=lines,
        columns=columns,
        targets=batch.completion_tokens[token].long(),
        sequences=sequences,
        packing=packing,
        tokens=token,
        temperatures=batch.temperatures[chosen][sequences],
        rollout_log_probs=batch.rollout_log_probs[token],
        advantages=plan.advantages[token],
        weights=torch.zeros(token.numel(), dtype=torch.float64) if plan.idle else plan.weights[token],
        old_log_probs=None if plan.old_log_probs is None else plan.old_log_probs[token],
    )


def _padded(batch: ExperienceBatch, chosen: Tensor) -> Tensor:
    """int64 [M, L]: indices into `batch.tokens`; -1 for padding, which is also a valid index."""
    prompt_lengths = batch.prompt_lengths[chosen]
    completion_lengths = batch.completion_lengths[chosen]
    prompt_tokens = batch.tokens.numel() - batch.rows.numel()

    position = torch.arange(int((prompt_lengths + completion_lengths).max()))
    in_completion = position - prompt_lengths[:, None]
    source = torch.where(
        in_completion < 0,
        batch.prompt_starts[chosen, None] + position,
        prompt_tokens + batch.completion_starts[chosen, None] + in_completion,
    )
    return torch.where(in_completion < completion_lengths[:, None], source, -1)
