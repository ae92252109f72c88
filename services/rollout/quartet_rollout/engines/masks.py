"""Sampling masks: the candidates that the filters left for each sampled token. See `base.SamplingMask`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingMask

_ALL = np.empty(0, dtype=np.int32)
"""Nothing was filtered out."""


def candidates(log_probs: torch.Tensor) -> list[np.ndarray]:
    """Return the remaining ids of each row, int32 ascending; an empty array if nothing was filtered out.

    Args:
        log_probs: float [B, V] after the filters, minus infinity for tokens that were filtered out.
    """
    left = log_probs > float("-inf")
    counts = left.sum(dim=-1)
    # Only for rows that were filtered: the ids of a whole vocabulary are many and carry no information.
    cut = counts < left.shape[-1]
    ids = left[cut].nonzero()[:, 1].to(torch.int32).cpu().numpy()
    parts = iter(np.split(ids, counts[cut].cumsum(0)[:-1].cpu().numpy()) if len(ids) else ())
    return [next(parts) if was_cut else _ALL for was_cut in cut.tolist()]


def join(of_tokens: Sequence[np.ndarray]) -> SamplingMask:
    """Return a completion's mask from the candidates of each of its tokens."""
    return SamplingMask(
        counts=np.array([ids.size for ids in of_tokens], dtype=np.int32),
        token_ids=np.concatenate(of_tokens) if of_tokens else _ALL,
    )
