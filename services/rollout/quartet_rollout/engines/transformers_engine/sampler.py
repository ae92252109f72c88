"""Samples one token for each row, with its log-prob."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.engines.masks import candidates
from quartet_rollout.engines.transformers_engine.sequences import EngineSequence

NEGATIVE_INFINITY = float("-inf")
_GREEDY = SamplingSettings(temperature=0.0)


def sample(
    rows: Sequence[EngineSequence], logits: torch.Tensor
) -> tuple[list[int], list[float], dict[int, np.ndarray]]:
    """Sample a token for each row from logits [B, V].

    Returns:
        Tokens, their log-probs, and by row index the candidates of rows with masks. Greedy rows take the argmax; their
        log-probs are the model's own, without temperature and filters.
    """
    settings = [row.sampling if row.sampling.temperature > 0 else _GREEDY for row in rows]
    logits = logits.float()
    temperatures = _column(settings, "temperature", logits)
    greedy = temperatures == 0
    divisors = temperatures.masked_fill(greedy, 1)
    if (divisors != 1).any():
        logits = logits / divisors
    log_probs = torch.log_softmax(_filter(settings, logits), dim=-1)
    masked = [i for i, row in enumerate(rows) if row.masked]
    left = dict(zip(masked, candidates(log_probs[masked]), strict=True)) if masked else {}
    tokens = log_probs.argmax(dim=-1, keepdim=True)
    if not greedy.all():
        tokens = torch.where(greedy, tokens, _draw(rows, log_probs))
    return tokens[:, 0].tolist(), log_probs.gather(-1, tokens)[:, 0].tolist(), left


def _draw(rows: Sequence[EngineSequence], log_probs: torch.Tensor) -> torch.Tensor:
    """Sample by inverting the cumulative distribution; return [B, 1]. Rows with a generator use it for their uniform
    number, others torch's. In float64, for the precision of sums over a large vocabulary."""
    sums = log_probs.double().exp_().cumsum(dim=-1)
    uniform = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device)
    for i, row in enumerate(rows):
        if row.generator is not None:
            uniform[i].uniform_(generator=row.generator)
    total = sums[:, -1:]
    # Strictly below the total, despite rounding: otherwise a candidate of probability 0 could be chosen.
    reached = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, reached, right=True)


def _filter(settings: Sequence[SamplingSettings], logits: torch.Tensor) -> torch.Tensor:
    """Set filtered logits to minus infinity: min_p, then top_k, then top_p of the remaining ones."""
    min_p, top_k, top_p = (_column(settings, name, logits) for name in ("min_p", "top_k", "top_p"))
    if min_p.any():
        probs = torch.softmax(logits, dim=-1)
        least = min_p * probs.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probs < least, NEGATIVE_INFINITY)
    any_top_k, any_top_p = top_k.any(), (top_p < 1).any()
    if not any_top_k and not any_top_p:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    if any_top_k:
        size = logits.shape[-1]
        last = top_k.long().masked_fill(top_k == 0, size).clamp(max=size) - 1
        # Candidates that tie with the last one stay.
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), NEGATIVE_INFINITY)
    if any_top_p:
        probs = torch.softmax(ordered, dim=-1)
        before = probs.cumsum(dim=-1) - probs
        # Keeps the smallest set whose mass reaches top_p: each candidate with less mass than that before it.
        ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), NEGATIVE_INFINITY)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _column(settings: Sequence[SamplingSettings], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a parameter of all rows, float32 [B, 1]."""
    return torch.tensor([[getattr(each, name)] for each in settings], dtype=torch.float32, device=like.device)
