"""The names under which a model's tensors are published and saved: Hugging Face's, each storage once."""

from __future__ import annotations

from torch import nn


def untied_names(model: nn.Module) -> list[str]:
    """Names of the state dict in order, each storage once: a tied `lm_head` is left out."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            names.append(name)
    return names
