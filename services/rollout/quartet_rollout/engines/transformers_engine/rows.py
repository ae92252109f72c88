"""Running completions, and a table of what a step must know of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    FinishReason,
    SamplingSettings,
    version_spans,
)
from quartet_rollout.engines.masks import join, masked


@dataclass(eq=False)
class Row:
    """One completion."""

    number: int
    """Of its request."""
    index: int
    """In its request."""
    prompt: list[int]
    sampling: SamplingSettings
    policy_version: InitVar[int] = UNKNOWN_VERSION
    generator: torch.Generator | None = None
    """Its own, where it has a seed."""
    limit: int = 0
    """Tokens it may have."""
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    """Of each token, where masks are wanted; see `masks`."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Of the tokens computed so far, where they are wanted, [tokens, hidden layers, experts of a token] each."""
    versions: list[tuple[int, int]] = field(init=False)
    """(policy version, first token), oldest first."""
    masked: bool = field(init=False)
    """Whether the candidates are wanted."""

    def __post_init__(self, policy_version: int) -> None:
        self.versions = [(policy_version, 0)]
        self.masked = masked(self.sampling)

    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    def completion(self, reason: FinishReason) -> EngineCompletion:
        """The completion as it is now."""
        return EngineCompletion(
            index=self.index,
            token_ids=np.array(self.output, dtype=np.int32),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            finish_reason=reason,
            version_spans=version_spans(self.versions, len(self.output)),
            mask=join(self.candidates) if self.masked else None,
            routed_experts=np.concatenate(self.experts) if self.experts else None,
        )


_GREEDY = SamplingSettings(temperature=0.0)
_COLUMNS = np.dtype(
    [
        ("length", np.int64),  # Tokens whose keys and values are there.
        ("newest", np.int64),  # The token after them.
        ("top_k", np.int64),
        ("temperature", np.float32),  # 0 where it is greedy, and has no filters.
        ("min_p", np.float32),
        ("top_p", np.float32),
    ],
    align=True,
)


def _line(row: Row) -> tuple[float, ...]:
    """What stands in a table, in the order of its columns, when the row is new in it."""
    drawn = row.sampling if row.sampling.temperature > 0 else _GREEDY
    return len(row.prompt) + len(row.output), 0, drawn.top_k, drawn.temperature, drawn.min_p, drawn.top_p


class Table:
    """The running rows, densely: row i has line i of every column. Rows move when others end."""

    def __init__(self, capacity: int) -> None:
        self.rows: list[Row] = []
        self._lines = np.zeros(capacity, dtype=_COLUMNS)

    def column(self, name: str, first: int = 0) -> np.ndarray:
        """[rows from `first` on]: the column itself, to read and to write."""
        return self._lines[name][first : len(self.rows)]

    def add(self, rows: Sequence[Row]) -> None:
        """Put rows behind the others. Their keys and values are those of all tokens they have."""
        first = len(self.rows)
        self.rows += rows
        # A row of fields at a time: one number at a time into an array takes as long as a layer of a small model.
        self._lines[first : len(self.rows)] = [_line(row) for row in rows]

    def remove(self, leaving: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take rows out, and move the last ones into their places. Returns (to, from): where which rows moved."""
        gone, left = set(leaving), len(self.rows) - len(leaving)
        to = sorted(row for row in gone if row < left)
        moved = [row for row in range(left, len(self.rows)) if row not in gone]
        for place, row in zip(to, moved, strict=True):
            self.rows[place] = self.rows[row]
        self._lines[to] = self._lines[moved]
        del self.rows[left:]
        return to, moved
