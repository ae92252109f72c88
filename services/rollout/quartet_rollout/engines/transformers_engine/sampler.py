"""Draws one token for each row, and says with which log-prob."""

from __future__ import annotations

import numpy as np
import torch

from quartet_rollout.engines.masks import candidates
from quartet_rollout.engines.transformers_engine.rows import Table

NEGATIVE_INFINITY = float("-inf")


class Sampler:
    """The sampling settings of a table's rows from `first` on, for one step."""

    def __init__(self, table: Table, first: int, device: torch.device) -> None:
        self._table, self._first, self._device = table, first, device
        self._rows = table.rows[first:]
        self.candidates: dict[int, np.ndarray] = {}
        """Of the rows that want masks, by their number from `first` on, for the tokens drawn."""

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens from logits [B, V]. Returns token ids (int64 [B]) and their log-probs (float32 [B]).

        Greedy rows are drawn by argmax; their log-probs are the model's own, without temperature and filters.
        """
        logits = logits.float()
        temperatures = self._column("temperature")
        greedy = temperatures == 0
        divisors = np.where(greedy, np.float32(1), temperatures)
        if (divisors != 1).any():
            logits = logits / self._tensor(divisors)
        log_probs = torch.log_softmax(self._filter(logits), dim=-1)
        if masked := [i for i, row in enumerate(self._rows) if row.masked]:
            self.candidates = dict(zip(masked, candidates(log_probs[masked]), strict=True))
        if greedy.all():
            tokens = log_probs.argmax(dim=-1)
        else:
            tokens = self._draw(log_probs)
            if greedy.any():
                tokens = torch.where(self._tensor(greedy)[:, 0], log_probs.argmax(dim=-1), tokens)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _draw(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The first candidate at which the sum of probabilities passes a uniform number: one number for each row, of
        its own generator where it has one, else of torch's. In float64: the sum over a large vocabulary is long."""
        sums = log_probs.double().exp_().cumsum(dim=-1)
        uniform = torch.rand(len(sums), 1, dtype=sums.dtype, device=self._device)
        for i, row in enumerate(self._rows):
            if row.generator is not None:
                uniform[i].uniform_(generator=row.generator)
        total = sums[:, -1:]
        # Below the sum, whatever is rounded: a candidate of probability 0 is never passed at.
        reached = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(sums, reached, right=True)[:, 0]

    def _filter(self, logits: torch.Tensor) -> torch.Tensor:
        """Set logits of refused candidates to minus infinity: min_p, then top_k, then top_p of what is left."""
        min_ps, top_ks, top_ps = (self._column(name) for name in ("min_p", "top_k", "top_p"))
        if min_ps.any():
            probs = torch.softmax(logits, dim=-1)
            least = self._tensor(min_ps) * probs.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(probs < least, NEGATIVE_INFINITY)
        any_top_k, any_top_p = top_ks.any(), (top_ps < 1).any()
        if not any_top_k and not any_top_p:
            return logits
        ordered, order = logits.sort(dim=-1, descending=True)
        if any_top_k:
            size = logits.shape[-1]
            last = self._tensor(np.where(top_ks > 0, top_ks, size)).clamp(max=size) - 1
            # Candidates that tie with the last one stay.
            ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), NEGATIVE_INFINITY)
        if any_top_p:
            top_p = self._tensor(top_ps)
            probs = torch.softmax(ordered, dim=-1)
            before = probs.cumsum(dim=-1) - probs
            # The smallest set whose mass reaches top_p: a candidate stays while the mass before it is below.
            ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), NEGATIVE_INFINITY)
        return torch.empty_like(logits).scatter_(-1, order, ordered)

    def _column(self, name: str) -> np.ndarray:
        return self._table.column(name, self._first)

    def _tensor(self, column: np.ndarray) -> torch.Tensor:
        """[B, 1]."""
        return torch.from_numpy(column.copy()).to(self._device)[:, None]
