"""A micro-batch: what one forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batches.experience import ExperienceBatch
from quartet_trainer.batches.plan import StepPlan


@dataclass(frozen=True)
class MicroBatch:
    """M completions after their prompts, padded on the right to the longest (L), and their t trained tokens, flat.

    Padding follows every real token, so a causal model needs no attention mask.
    """

    input_ids: Tensor
    """int64 [M, L]."""
    rows: Tensor
    """int64 [t]: the row of each trained token."""
    columns: Tensor
    """int64 [t]: the position that predicts it, one before its own."""
    targets: Tensor
    """int64 [t]: its id."""
    sequences: Tensor
    """int64 [t]: the completion of the micro-batch that it belongs to, in [0, M). Completions are never cut."""
    tokens: Tensor
    """int64 [t]: its place among the T completion tokens of the global batch."""
    temperatures: Tensor
    """float32 [t]: what it was sampled at."""
    rollout_log_probs: Tensor
    """float32 [t]."""
    advantages: Tensor
    """float64 [t]."""
    weights: Tensor
    """float64 [t]: its share in the batch's loss."""
    old_log_probs: Tensor | None = None
    """float64 [t]: see `StepPlan.old_log_probs`."""

    mask_counts: Tensor | None = None
    """int64 [t]: with sampling masks, the candidates each was drawn from; 0: all of the vocabulary."""
    mask_ids: Tensor | None = None
    """int64 [sum of the counts]: their ids."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the policy takes."""
        always = self.input_ids, self.rows, self.columns, self.targets, self.temperatures
        if self.mask_counts is None or self.mask_ids is None:
            return always
        return *always, self.mask_counts, self.mask_ids

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The same on `device`, with all that is floating-point as `dtype`."""

        def move(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return value.to(device, dtype if value.is_floating_point() else value.dtype, non_blocking=True)

        return MicroBatch(**{name: move(value) for name, value in vars(self).items()})


def collate(batch: ExperienceBatch, plan: StepPlan, completions: np.ndarray) -> MicroBatch:
    """Gather `completions` (int64 indices into the batch) for one forward pass."""
    chosen = torch.from_numpy(completions)
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
    real = in_completion < completion_lengths[:, None]
    input_ids = torch.where(real, batch.tokens[torch.where(real, source, 0)], 0).long()

    rows = torch.repeat_interleave(torch.arange(chosen.numel()), completion_lengths)
    first = completion_lengths.cumsum(0) - completion_lengths
    offset = torch.arange(rows.numel()) - first[rows]
    token = batch.completion_starts[chosen][rows] + offset
    trained = plan.mask[token]
    rows, offset, token = rows[trained], offset[trained], token[trained]
    counts, ids = (None, None) if batch.candidates is None else batch.candidates.of(token)
    return MicroBatch(
        mask_counts=counts,
        mask_ids=ids,
        input_ids=input_ids,
        rows=rows,
        columns=prompt_lengths[rows] + offset - 1,
        targets=batch.completion_tokens[token].long(),
        sequences=rows,
        tokens=token,
        temperatures=batch.temperatures[chosen][rows],
        rollout_log_probs=batch.rollout_log_probs[token],
        advantages=plan.advantages[token],
        weights=torch.zeros(token.numel(), dtype=torch.float64) if plan.idle else plan.weights[token],
        old_log_probs=None if plan.old_log_probs is None else plan.old_log_probs[token],
    )
