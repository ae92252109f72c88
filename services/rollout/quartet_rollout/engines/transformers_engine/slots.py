"""Keys and values of running rows: row i has slot i, its tokens from the slot's first position on.

A row that ends leaves a slot that the last row moves into, and a new row gets the next one: neither touches the others'
keys and values. What lies behind a row's newest token is masked, and finite all the same: a masked infinity, left by a
row that overflowed, would still make its successor's attention no number. So a slot is taken over whole.
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
    """A cache for steps of one token for each row, in front of layers that are filled by prefilled caches."""

    def __init__(self) -> None:
        self.cache: Cache = Cache(layers=[])
        self.layers: list[_SlotLayer] = []
        self.positions = torch.empty(0, dtype=torch.int64)
        """int64 [rows]: where the next step writes, on the device; set by `expect`."""
        self.width = 0
        """Positions that hold something in any row, or will after the next step."""
        self._every = torch.empty(0, dtype=torch.int64)

    def expect(self, positions: torch.Tensor, widest: int) -> None:
        """The next step is of so many rows, each with its token at its position, the last of them at `widest`."""
        if len(self._every) != len(positions):
            self._every = torch.arange(len(positions), device=positions.device)
        self.positions, self.width = positions, widest + 1
        for layer in self.layers:
            layer.reserve(len(positions), self.width)

    def add(self, first: int, prefilled: Cache, which: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill the slots from `first` on.

        Args:
            first: how many rows there are already.
            prefilled: keys and values of prompts, padded on the left.
            which: for each new row, which of the prompts it begins with.
            lengths: for each new row, how many tokens that prompt has. Equal neighbours are copied at once.
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
        """Copy slots to others."""
        for layer in self.layers if to else ():
            layer.keys[to] = layer.keys[source]
            layer.values[to] = layer.values[source]

    def write(self, into: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put [rows, heads, 1, size] at the rows' positions; return [rows, heads, width, size]."""
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
        """Have so much memory. `like`: a layer of the same model, the first time."""
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
        """By `reserve`."""

    def get_seq_length(self) -> int:
        return self._slots.width - 1

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0


def _grown(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """At least so large, by steps that grow with it, with what was there. Behind that zeros: a masked product with
    what is no number would be none."""
    had_rows, _, had_positions, _ = old.shape
    more_rows = max(rows, 2 * had_rows) - had_rows if rows > had_rows else 0
    wide = max(positions + positions // 2, _LEAST_POSITIONS)
    return pad(old, (0, 0, 0, wide - had_positions if positions > had_positions else 0, 0, 0, 0, more_rows))
