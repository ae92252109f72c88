"""A micro-batch in one row without padding, in which completions share their group's prompt: it is computed once.

Only attention looks at other tokens; all else in a model runs over the row as it is. Attention takes the row in
segments: a prompt attends to itself, a completion to its prompt and to itself. `Packing` says which, in the terms of
variable-length attention (`torch.nn.attention.varlen`), and cuts the same segments into padded blocks where only
attention by a mask is to be had.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from quartet_trainer.batch.decode import ExperienceBatch
from quartet_trainer.batch.planner import cut_alike

MOST_MASKED = 2**24
"""Elements of a mask: 64 MiB in float32."""


@dataclass(frozen=True)
class Block:
    """Segments of like length, by their tokens' places in the row, padded on the right with the last of them."""

    queries: Tensor
    """int64 [m, q]."""
    keys: Tensor
    """int64 [m, k]: `queries` itself where a segment attends to no other."""
    last: Tensor
    """int64 [m, q]: the last key that each query sees."""
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
    """How a row of S tokens makes n segments. Their queries are the row, one segment after another."""

    positions: Tensor
    """int64 [1, S]: each token's place in its sequence."""
    query_starts: Tensor
    """int32 [n + 1]: where a segment's queries begin in the row, and S."""
    keys: Tensor
    """int64 [K]: the places in the row of the segments' keys, one segment after another. The last of a segment are its
    queries' own."""
    key_starts: Tensor
    """int32 [n + 1]: where a segment's begin in `keys`, and K."""
    longest_query: int
    longest_key: int
    max_padding: float = 1.0
    """Share of padding above which segments are too unlike for one block."""

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> Packing:
        """Of `rows` sequences of `length` tokens that share nothing."""
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
        places = torch.arange(rows * length, device=device)
        return cls((places % length)[None], starts, places, starts, length, length)

    def to(self, device: torch.device) -> Packing:
        """The same on `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], Tensor]:
        """Blocks that have every token among their queries, and int64 [S]: where a token is among those of all blocks,
        flat and one after another; of several the first.

        Completions are taken with their prompts, which are then copied, as attention that is causal throughout is
        fastest; or prompts and completions each by themselves, the latter with a mask: whichever multiplies fewer
        queries with keys.
        """
        device = self.keys.device
        starts = [edges.long().cpu() for edges in (self.query_starts, self.key_starts)]
        queries, keys = (edges.diff() for edges in starts)
        keys_of = self.keys.cpu()
        alone = queries == keys
        copied = alone & (keys_of.bincount(minlength=1)[keys_of[starts[1][:-1]]] > 1)
        whole = self._cut(~copied, keys)
        apart = [(one, True) for one in self._cut(alone, keys)] + [(one, False) for one in self._cut(~alone, queries)]
        masked = [len(cut) * int(queries[cut].max()) * int(keys[cut].max()) for cut, square in apart if not square]
        scores = sum(len(cut) * int(keys[cut[0]]) ** 2 / 2 for cut in whole)
        fewer = int((keys[alone] ** 2).sum()) / 2 + sum(masked) < scores
        cuts = apart if fewer and max(masked, default=0) <= MOST_MASKED else [(cut, True) for cut in whole]
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

    def _cut(self, chosen: Tensor, lengths: Tensor) -> list[Tensor]:
        """The chosen segments, those of like length together, the longest first."""
        indices = chosen.nonzero()[:, 0].numpy()
        longest_first = indices[np.argsort(-lengths.numpy()[indices], kind="stable")]
        return [torch.from_numpy(part) for part in cut_alike(longest_first, lengths.numpy(), self.max_padding)]


@dataclass(frozen=True)
class PackedRow:
    """The tokens of M completions and their prompts, and where they are."""

    source: Tensor
    """int64 [1, S]: places in `ExperienceBatch.tokens`."""
    prompt_ends: Tensor
    """int64 [M]: the place of the last token of a completion's prompt."""
    completion_starts: Tensor
    """int64 [M]: the place of its first token."""
    packing: Packing


def share_prompts(batch: ExperienceBatch, chosen: Tensor, max_padding: float) -> PackedRow:
    """Lay out the completions `chosen` (int64 [M]), those of a group one after another: all prompts, then they.

    Args:
        batch: the groups of the step.
        chosen: completions.
        max_padding: see `Packing`.
    """
    _, group, sizes = torch.unique_consecutive(batch.groups[chosen], return_inverse=True, return_counts=True)
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
    keys_before, queries = prompts[group][answered], completions[answered]
    begins = torch.stack([prompt_starts[group][answered], completion_starts[answered]], dim=1).flatten()
    run, place = _runs(torch.stack([keys_before, queries], dim=1).flatten())
    query_counts, key_counts = torch.cat([prompts, queries]), torch.cat([prompts, keys_before + queries])
    return PackedRow(
        source=source[None],
        prompt_ends=(prompt_starts + prompts - 1)[group],
        completion_starts=completion_starts,
        packing=Packing(
            positions=torch.cat([prompt_offset, prompts[group][of_row] + offset])[None],
            query_starts=nn.functional.pad(query_counts.cumsum(0), (1, 0)).int(),
            keys=torch.cat([torch.arange(prompt_offset.numel()), begins[run] + place]),
            key_starts=nn.functional.pad(key_counts.cumsum(0), (1, 0)).int(),
            longest_query=int(query_counts.max()),
            longest_key=int(key_counts.max()),
            max_padding=max_padding,
        ),
    )


def _offsets(lengths: Tensor) -> Tensor:
    """0, 1, ... of runs of these lengths as rows, padded on the right with their last, int64 [n, longest]."""
    return torch.arange(int(lengths.max())).minimum(lengths[:, None] - 1)


def _starts(lengths: Tensor) -> Tensor:
    """Where runs of these lengths begin, one after another."""
    return lengths.cumsum(0) - lengths


def _runs(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of these lengths, one after another: of each element, its run and its place in it."""
    run = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return run, torch.arange(run.numel()) - _starts(lengths)[run]
