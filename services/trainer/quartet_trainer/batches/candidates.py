"""Sampling masks: the candidates that each token was drawn from, after top_p, top_k and min_p."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from quartet.v1 import experience_pb2, tensor_pb2
from torch import Tensor

from quartet_trainer.batches.arrays import ExperienceError, all_rows, rows


@dataclass(frozen=True)
class Candidates:
    """What each of T completion tokens was drawn from, after top_p, top_k and min_p."""

    counts: Tensor
    """int64 [T]; 0: all of the vocabulary."""
    starts: Tensor
    """int64 [T]: where in `token_ids` a token's begin."""
    token_ids: Tensor
    """int32 [sum of counts]."""

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [t] and ids [sum of them], both int64, of the tokens with these places [t]."""
        counts, starts = self.counts[tokens], self.starts[tokens]
        shift = starts - (counts.cumsum(0) - counts)
        places = torch.repeat_interleave(shift, counts) + torch.arange(int(counts.sum()))
        return counts, self.token_ids[places].long()


def decode_candidates(
    group: experience_pb2.GroupTensors,
    completions: np.ndarray,
    lengths: np.ndarray,
    loss_mask: np.ndarray,
    vocabulary_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A group's candidates: int32 counts of each completion token and all ids. Raises ExperienceError."""
    if not group.HasField("sampling_mask_counts"):
        raise ExperienceError("sampling_mask_counts is missing; with run.sampling_masks = true every group has it")
    counts = all_rows(group.sampling_mask_counts, tensor_pb2.DTYPE_INT32, lengths, "sampling_mask_counts")
    if (counts < 0).any() or (counts > vocabulary_size).any():
        raise ExperienceError(
            f"sampling_mask_counts has {counts.min()} to {counts.max()}; allowed: 0 to {vocabulary_size}"
        )
    row_of = np.repeat(np.arange(lengths.size), lengths)
    per_row = np.bincount(row_of, weights=counts, minlength=lengths.size).astype(np.int64)
    ids, given = rows(group.sampling_mask_token_ids, tensor_pb2.DTYPE_INT32, "sampling_mask_token_ids")
    if not np.array_equal(given, per_row):
        raise ExperienceError(
            f"sampling_mask_token_ids has {ids.size} ids; sampling_mask_counts says {per_row.tolist()}"
        )
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary_size):
        raise ExperienceError(
            f"sampling_mask_token_ids has ids from {ids.min()} to {ids.max()}; this model's are 0 to "
            f"{vocabulary_size - 1}"
        )
    cut = np.flatnonzero(counts)
    if cut.size:
        drawn = np.repeat(completions[cut], counts[cut]) == ids
        among = np.logical_or.reduceat(drawn, np.cumsum(counts[cut]) - counts[cut])
        lost = cut[~among & (loss_mask[cut] != 0)]
        if lost.size:
            raise ExperienceError(
                f"sampling_mask_token_ids lacks the token itself at {lost.size} places, the first at {lost[0]}"
            )
    return counts, ids
