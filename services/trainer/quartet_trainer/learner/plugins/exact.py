"""What ColossalAI's bf16 would round once and for all, and must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


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
