"""Micro-batches, the input of a forward pass: padded rows, or one row in which a prompt is computed once for all its
rows.

Only attention mixes tokens; the rest of a model runs over the row as it is. Attention treats the row as segments: a
prompt attends to itself, a completion to its prompt and itself. `Packing` describes them in the terms of
variable-length attention (`torch.nn.attention.varlen`), and as padded blocks for attention with a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from quartet_trainer.batch.decode import ExperienceBatch
from quartet_trainer.batch.planner import StepPlan, split_padded

MAX_MASK_ELEMENTS = 2**24
"""Maximum elements of a mask: 64 MiB in float32."""


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


@dataclass(frozen=True)
class Block:
    """Segments of similar length, as indices into the row, padded on the right with their last token."""

    queries: Tensor
    """int64 [m, q]."""
    keys: Tensor
    """int64 [m, k]: the same object as `queries` if the segments attend to themselves only."""
    last: Tensor
    """int64 [m, q]: index of the last key that each query sees."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None = None) -> Tensor | None:
        """bool [m, 1, q, k]: the keys that a query sees, at most the last `window`; None: plain causal attention."""
        if window not in self._masks:
            key = torch.arange(self.keys.shape[1], device=self.keys.device)
            seen = key <= self.last[..., None]
            if window is not None and window < self.keys.shape[1]:
                seen &= key > self.last[..., None] - window
            elif self.queries is self.keys:
                seen = None
            self._masks[window] = None if seen is None else seen[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class Packing:
    """The n segments of a row of S tokens. The segments' queries, one segment after another, are the row."""

    positions: Tensor
    """int64 [1, S]: each token's position in its sequence."""
    query_starts: Tensor
    """int32 [n + 1]: the row index of each segment's first query, then S."""
    keys: Tensor
    """int64 [K]: row indices of the segments' keys, one segment after another; each segment's end with its queries."""
    key_starts: Tensor
    """int32 [n + 1]: index into `keys` of each segment's first key, then K."""
    longest_query: int
    longest_key: int
    max_padding: float = 1.0
    """Maximum share of padding in a block."""

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> Packing:
        """The packing of `rows` sequences of `length` tokens that share no prompt."""
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
        places = torch.arange(rows * length, device=device)
        return cls((places % length)[None], starts, places, starts, length, length)

    def to(self, device: torch.device) -> Packing:
        """Copy it to `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], Tensor]:
        """Blocks whose queries include every token, and int64 [S]: the first index of each token among the queries of
        all blocks, flattened and concatenated.

        Either completions are computed together with copies of their prompts, by plain causal attention, which is the
        fastest; or prompts and completions are separate segments, and completions have a mask. The one with fewer
        products of queries and keys is chosen.
        """
        device = self.keys.device
        starts = [edges.long().cpu() for edges in (self.query_starts, self.key_starts)]
        queries, keys = (edges.diff() for edges in starts)
        keys_of = self.keys.cpu()
        alone = queries == keys
        copied = alone & (keys_of.bincount(minlength=1)[keys_of[starts[1][:-1]]] > 1)
        whole = self._split(~copied, keys)
        prompts, completions = self._split(alone, keys), self._split(~alone, queries)
        apart = [*((cut, True) for cut in prompts), *((cut, False) for cut in completions)]
        masked = [len(cut) * int(queries[cut].max()) * int(keys[cut].max()) for cut in completions]
        scores = sum(len(cut) * int(keys[cut[0]]) ** 2 / 2 for cut in whole)
        fewer = int((keys[alone] ** 2).sum()) / 2 + sum(masked) < scores
        cuts = apart if fewer and max(masked, default=0) <= MAX_MASK_ELEMENTS else [(cut, True) for cut in whole]
        blocks = []
        for cut, square in cuts:
            counts = keys[cut] if square else queries[cut]
            rows = keys_of[starts[1][cut, None] + _offsets(keys[cut])]
            last = (keys[cut] - counts)[:, None] + _offsets(counts)
            blocks.append((rows if square else rows.gather(1, last), rows, last))
        flat = torch.cat([taken.flatten() for taken, _, _ in blocks])
        first = torch.full((self.positions.numel(),), flat.numel())
        first.scatter_reduce_(0, flat, torch.arange(flat.numel()), "amin")
        on_device = []
        for taken, rows, last in blocks:
            there = rows.to(device)
            on_device.append(Block(there if taken is rows else taken.to(device), there, last.to(device)))
        return tuple(on_device), first.to(device)

    def _split(self, chosen: Tensor, lengths: Tensor) -> list[Tensor]:
        """Divide the chosen segments into parts of similar length, the longest first."""
        indices = chosen.nonzero()[:, 0].numpy()
        longest_first = indices[np.argsort(-lengths.numpy()[indices], kind="stable")]
        return [torch.from_numpy(part) for part in split_padded(longest_first, lengths.numpy(), self.max_padding)]


@dataclass(frozen=True)
class PackedRow:
    """The layout of M completions and their prompts in one row of S tokens."""

    source: Tensor
    """int64 [1, S]: indices into `ExperienceBatch.tokens`."""
    prompt_ends: Tensor
    """int64 [M]: row index of the last token of a completion's prompt."""
    completion_starts: Tensor
    """int64 [M]: row index of a completion's first token."""
    packing: Packing


def share_prompts(batch: ExperienceBatch, chosen: Tensor, max_padding: float) -> PackedRow:
    """Lay out prompts, then completions.

    Args:
        batch: the groups of the step.
        chosen: int64 [M]: rows, those of a prompt consecutive.
        max_padding: see `Packing`.
    """
    _, prompt, sizes = torch.unique_consecutive(batch.prompts[chosen], return_inverse=True, return_counts=True)
    first = chosen[sizes.cumsum(0) - sizes]
    prompts, completions = batch.prompt_lengths[first], batch.completion_lengths[chosen]
    of_prompt, prompt_offset = _runs(prompts)
    of_row, offset = _runs(completions)
    before = batch.tokens.numel() - batch.rows.numel()
    source = torch.cat(
        [
            batch.prompt_starts[first][of_prompt] + prompt_offset,
            before + batch.completion_starts[chosen][of_row] + offset,
        ]
    )
    prompt_starts, completion_starts = _starts(prompts), prompts.sum() + _starts(completions)
    answered = (completions > 0).nonzero()[:, 0]
    keys_before, queries = prompts[prompt][answered], completions[answered]
    begins = torch.stack([prompt_starts[prompt][answered], completion_starts[answered]], dim=1).flatten()
    run, place = _runs(torch.stack([keys_before, queries], dim=1).flatten())
    query_counts, key_counts = torch.cat([prompts, queries]), torch.cat([prompts, keys_before + queries])
    return PackedRow(
        source=source[None],
        prompt_ends=(prompt_starts + prompts - 1)[prompt],
        completion_starts=completion_starts,
        packing=Packing(
            positions=torch.cat([prompt_offset, prompts[prompt][of_row] + offset])[None],
            query_starts=nn.functional.pad(query_counts.cumsum(0), (1, 0)).int(),
            keys=torch.cat([torch.arange(prompt_offset.numel()), begins[run] + place]),
            key_starts=nn.functional.pad(key_counts.cumsum(0), (1, 0)).int(),
            longest_query=int(query_counts.max()),
            longest_key=int(key_counts.max()),
            max_padding=max_padding,
        ),
    )


def _offsets(lengths: Tensor) -> Tensor:
    """Rows 0, 1, ... of these lengths, padded on the right with their last element, int64 [n, longest]."""
    return torch.arange(int(lengths.max())).minimum(lengths[:, None] - 1)


def _starts(lengths: Tensor) -> Tensor:
    """The start of each of consecutive runs of these lengths."""
    return lengths.cumsum(0) - lengths


def _runs(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For each element of consecutive runs of these lengths: its run, and its index within the run."""
    run = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return run, torch.arange(run.numel()) - _starts(lengths)[run]
