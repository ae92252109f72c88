"""Running completions and the keys and values of their tokens.

Rows of different length share tensors [rows, heads, positions, head size], padded on the left, so that the newest
token of every row stands in the last column. A row's padding is masked, and its positions count from its own first
token, so where it stands in the tensor does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from quartet_rollout.engines.base import FinishReason, SamplingSettings
from quartet_rollout.engines.core import CoreCompletion
from quartet_rollout.engines.masks import join, masked


@dataclass(eq=False)
class Row:
    """One completion."""

    key: str
    prompt: list[int]
    sampling: SamplingSettings
    generator: torch.Generator | None
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    """Of each token, where masks are wanted; see `masks`."""

    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    def completion(self, reason: FinishReason) -> CoreCompletion:
        """The completion as it is now."""
        return CoreCompletion(
            self.key,
            np.array(self.output, dtype=np.int32),
            np.array(self.log_probs, dtype=np.float32),
            reason,
            join(self.candidates) if masked(self.sampling) else None,
        )


@dataclass(eq=False)
class Batch:
    """Rows with their cache. Every row's cache holds all its tokens but the newest."""

    rows: list[Row]
    cache: Any
    """A DynamicCache: one layer of keys and values for each layer of the model."""
    mask: torch.Tensor
    """int64 [rows, positions]: 1 where the cache holds a token, 0 where it is padding."""

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order, and drop columns that are padding for all of them."""
        index = torch.tensor(rows, device=self.mask.device)
        self.rows = [self.rows[row] for row in rows]
        self.mask = self.mask[index]
        self.cache.batch_select_indices(index)
        first = int(self.mask.any(dim=0).int().argmax()) if rows else 0
        if first:
            self.mask = self.mask[:, first:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]

    def extend(self, other: Batch) -> None:
        """Take over another batch's rows."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        left, right = width - self.mask.shape[1], width - other.mask.shape[1]
        self.rows = self.rows + other.rows
        self.mask = torch.cat([pad(self.mask, (left, 0)), pad(other.mask, (right, 0))])
        for mine, its in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([pad(mine.keys, (0, 0, left, 0)), pad(its.keys, (0, 0, right, 0))])
            mine.values = torch.cat([pad(mine.values, (0, 0, left, 0)), pad(its.values, (0, 0, right, 0))])
