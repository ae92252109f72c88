"""What must be exact however a model is spread: the norm of a gradient held in parts, and buffers under bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


@contextmanager
def exact_buffers(model: nn.Module) -> Iterator[None]:
    """Within it, a model may be cast; its floating-point buffers are afterwards what they were before, on its device.

    They are rotary frequencies. Rounded to bf16 they are off by up to 0.4%: at the thousandth token an angle of some
    radians, and another model than the one that generates.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            exact: Tensor | None = kept.get(f"{name}.{key}" if name else key)
            if exact is not None and buffer is not None:
                module._buffers[key] = exact.to(buffer.device)
