"""Sampling masks: which candidates the filters left, for each token drawn. See `base.SamplingMask`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingMask, SamplingSettings

_ALL = np.empty(0, dtype=np.int32)
"""The whole vocabulary was left."""


def masked(sampling: SamplingSettings) -> bool:
    """Whether a completion of these settings has a mask."""
    return sampling.masks and sampling.truncates


def candidates(log_probs: torch.Tensor) -> list[np.ndarray]:
    """The ids that are left in each row, int32 ascending; an empty array where all are.

    Args:
        log_probs: float [B, V] after the filters, minus infinity for what they cut off.
    """
    left = log_probs > float("-inf")
    counts = left.sum(dim=-1)
    # What is left of a row is written down only where something is gone: a whole vocabulary is much, and says nothing.
    cut = counts < left.shape[-1]
    ids = left[cut].nonzero()[:, 1].to(torch.int32).cpu().numpy()
    parts = iter(np.split(ids, counts[cut].cumsum(0)[:-1].cpu().numpy()) if len(ids) else ())
    return [next(parts) if was_cut else _ALL for was_cut in cut.tolist()]


def join(of_tokens: Sequence[np.ndarray]) -> SamplingMask:
    """A completion's mask from the candidates of each of its tokens."""
    return SamplingMask(
        counts=np.array([ids.size for ids in of_tokens], dtype=np.int32),
        token_ids=np.concatenate(of_tokens) if of_tokens else _ALL,
    )
