"""Draws one token for each row, and says with which log-prob."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.engines.masks import candidates, masked

NEGATIVE_INFINITY = float("-inf")


class Sampler:
    """Sampling settings of a batch's rows, as tensors. Made anew when rows come or go."""

    def __init__(
        self,
        settings: Sequence[SamplingSettings],
        generators: Sequence[torch.Generator | None],
        device: torch.device,
    ) -> None:
        """`generators`: one for each row with a seed, None for the others, which share torch's default generator."""
        # Greedy rows are drawn by argmax; their log-probs are the model's own, without temperature and filters.
        drawn = [s if s.temperature > 0 else SamplingSettings() for s in settings]
        self._seeded = [(row, generator) for row, generator in enumerate(generators) if generator is not None]
        self._greedy = _column([s.temperature == 0 for s in settings], device)[:, 0]
        self._any_greedy = any(s.temperature == 0 for s in settings)
        self._all_greedy = all(s.temperature == 0 for s in settings)
        self._temperature = _column([s.temperature for s in drawn], device)
        self._min_p = _column([s.min_p for s in drawn], device) if any(s.min_p > 0 for s in drawn) else None
        self._top_k = _column([s.top_k for s in drawn], device) if any(s.top_k > 0 for s in drawn) else None
        self._top_p = _column([s.top_p for s in drawn], device) if any(s.top_p < 1 for s in drawn) else None
        self._masked = [row for row, s in enumerate(settings) if masked(s)]
        self.candidates: dict[int, np.ndarray] = {}
        """Of the rows that want masks, for the tokens drawn last."""

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens from logits [B, V]. Returns token ids (int64 [B]) and their log-probs (float32 [B])."""
        log_probs = torch.log_softmax(self._filter(logits.float() / self._temperature), dim=-1)
        if self._masked:
            self.candidates = dict(zip(self._masked, candidates(log_probs[self._masked]), strict=True))
        if self._all_greedy:
            tokens = log_probs.argmax(dim=-1)
        else:
            tokens = self._draw(log_probs)
            if self._any_greedy:
                tokens = torch.where(self._greedy, log_probs.argmax(dim=-1), tokens)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _draw(self, log_probs: torch.Tensor) -> torch.Tensor:
        # argmax(p / e) with e ~ Exponential(1) is a draw from p: one noise tensor, and rows keep their own generators.
        noise = torch.empty_like(log_probs).exponential_()
        for row, generator in self._seeded:
            noise[row].exponential_(generator=generator)
        return (log_probs - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()).argmax(dim=-1)

    def _filter(self, logits: torch.Tensor) -> torch.Tensor:
        """Set logits of refused candidates to minus infinity: min_p, then top_k, then top_p of what is left."""
        if self._min_p is not None:
            probs = torch.softmax(logits, dim=-1)
            logits = logits.masked_fill(probs < self._min_p * probs.amax(dim=-1, keepdim=True), NEGATIVE_INFINITY)
        if self._top_k is None and self._top_p is None:
            return logits
        ordered, order = logits.sort(dim=-1, descending=True)
        if self._top_k is not None:
            size = logits.shape[-1]
            last = torch.where(self._top_k > 0, self._top_k, size).clamp(max=size) - 1
            # Candidates that tie with the last one stay.
            ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), NEGATIVE_INFINITY)
        if self._top_p is not None:
            probs = torch.softmax(ordered, dim=-1)
            before = probs.cumsum(dim=-1) - probs
            # The smallest set whose mass reaches top_p: a candidate stays while the mass before it is below.
            ordered = ordered.masked_fill((before >= self._top_p) & (self._top_p < 1), NEGATIVE_INFINITY)
        return torch.empty_like(logits).scatter_(-1, order, ordered)


def _column(values: Sequence[float | int | bool], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)[:, None]
