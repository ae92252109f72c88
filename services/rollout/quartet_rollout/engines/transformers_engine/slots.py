"""Keys and values of running rows: row i has slot i, its tokens begin at the slot's first position.

When a row ends, the last row moves into its slot, and a new row gets the next free one, so other rows' keys and values
are not copied. Positions after a row's newest token are masked, but must be finite: an infinity left by an earlier row
would make the attention NaN even when masked. So a new row overwrites its whole slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

_LEAST_POSITIONS = 64


class Slots:
    """A KV cache for steps of one token per row. `add` copies prefilled caches into it."""

    def __init__(self) -> None:
        self.cache: Cache = Cache(layers=[])
        self.layers: list[_SlotLayer] = []
        self.positions = torch.empty(0, dtype=torch.int64)
        """int64 [rows], on the device: where the next step writes; set by `expect`."""
        self.width = 0
        """Positions in use by the longest row, the next step included."""
        self._every = torch.empty(0, dtype=torch.int64)

    def expect(self, positions: torch.Tensor, widest: int) -> None:
        """Prepare the next step: each row's token is at its position, and `widest` is the largest position."""
        if len(self._every) != len(positions):
            self._every = torch.arange(len(positions), device=positions.device)
        self.positions, self.width = positions, widest + 1
        for layer in self.layers:
            layer.reserve(len(positions), self.width)

    def add(self, first: int, prefilled: Cache, which: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill the slots from `first` on.

        Args:
            first: the number of rows already there.
            prefilled: keys and values of prompts, padded on the left.
            which: for each new row, the index of its prompt.
            lengths: for each new row, the tokens of its prompt. Equal neighbors are copied together.
        """
        if not self.layers:
            self.layers = [_SlotLayer(self) for _ in prefilled.layers]
            self.cache = Cache(layers=list(self.layers))
        self.width = max(self.width, *lengths)
        last = first + len(which)
        for mine, its in zip(self.layers, prefilled.layers, strict=True):
            mine.reserve(last, max(lengths), like=its)
            source = torch.tensor(which, device=its.keys.device)
            for into, prompts in ((mine.keys, its.keys), (mine.values, its.values)):
                new, rows = into[first:last], prompts.index_select(0, source)
                begin = 0
                for length, alike in groupby(lengths):
                    end = begin + len(list(alike))
                    new[begin:end, :, :length] = rows[begin:end, :, -length:]
                    new[begin:end, :, length:] = 0
                    begin = end

    def move(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Copy slots `source` to slots `to`."""
        for layer in self.layers if to else ():
            layer.keys[to] = layer.keys[source]
            layer.values[to] = layer.values[source]

    def write(self, into: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write [rows, heads, 1, size] at the rows' positions; return [rows, heads, width, size]."""
        into[self._every, :, self.positions] = new[:, :, 0]
        return into[: len(self._every), :, : self.width]


class _SlotLayer(CacheLayerMixin):
    """One layer, as transformers' models see it."""

    keys: torch.Tensor  # [slots, heads, positions, size]
    values: torch.Tensor
    is_initialized: bool

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def reserve(self, rows: int, positions: int, like: Any = None) -> None:
        """Grow to at least this size. `like`: a layer of the same model, needed the first time."""
        if not self.is_initialized:
            _, heads, _, size = like.keys.shape
            self.keys = like.keys.new_empty(0, heads, 0, size)
            self.values = like.values.new_empty(0, heads, 0, like.values.shape[-1])
            self.is_initialized = True
        if rows > self.keys.shape[0] or positions > self.keys.shape[2]:
            self.keys, self.values = _grown(self.keys, rows, positions), _grown(self.values, rows, positions)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._slots.write(self.keys, key_states), self._slots.write(self.values, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: `reserve` does it."""

    def get_seq_length(self) -> int:
        return self._slots.width - 1

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0


def _grown(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """Return a copy of at least this size, which grows geometrically. New positions are zero: NaN would get through the
    mask."""
    had_rows, _, had_positions, _ = old.shape
    more_rows = max(rows, 2 * had_rows) - had_rows if rows > had_rows else 0
    wide = max(positions + positions // 2, _LEAST_POSITIONS)
    return pad(old, (0, 0, 0, wide - had_positions if positions > had_positions else 0, 0, 0, 0, more_rows))
