"""The critic's loss of each token."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_clip - R)^2) / 2, where V_clip is V held within +-clip of its value before the step: PPO's.

    Args:
        values: float [t], with gradient.
        old_values: float [t], without.
        returns: float [t], without.
        clip: > 0; 0: no clipping.

    Returns:
        The losses, float [t], and where the bound took the gradient away, bool [t].
    """
    loss = (values - returns) ** 2
    if not clip:
        return loss / 2, torch.zeros_like(loss, dtype=torch.bool)
    # The value itself is held: old + (value - old) may differ from it by rounding, and would count as bounded.
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(loss, bounded) / 2, (bounded > loss).detach()
