"""The norm of a gradient that the ranks hold in parts, and scaling it down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def clip_parts(
    parts: Sequence[tuple[Tensor, float]],
    max_norm: float,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup | None] = (None,),
) -> float:
    """Scale all parts, in place, so that the whole gradient's norm is `max_norm` at most. All ranks call.

    Args:
        parts: what this rank steps with, of any shape, and the share of each in the sum over all ranks.
        max_norm: above 0.
        device: where the sum is made, in float64.
        groups: one after the other, the sum over each is taken; None: all ranks.

    Returns:
        The norm before, that of the whole gradient.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part, share in parts:
        squares += share * part.double().square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt().item()
    if norm > max_norm:
        for part, _ in parts:
            part.mul_(max_norm / (norm + 1e-6))
    return norm
