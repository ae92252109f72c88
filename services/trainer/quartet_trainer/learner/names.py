"""The names under which a model's tensors are published and saved: those of its family's files, each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def untied_names(model: nn.Module) -> list[str]:
    """Names of the state dict in order, each storage once: a tied `lm_head` is left out."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            names.append(name)
    return names


def is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers made other tensors of a folder's: one of a layer's experts, `lm_head` of `embed_out`."""
    return bool(getattr(model, "_weight_conversions", None))


def as_in_files(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of a model under the names, and in the parts, that its family's files and vLLM have."""
    if not is_converted(model):
        yield from tensors
        return
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def shapes_in_files(model: PreTrainedModel, specs: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes of what `as_in_files` gives, from those of the model's own tensors."""
    empty = ((name, torch.empty(shape, device="meta")) for name, shape in specs.items())
    return {name: tensor.shape for name, tensor in as_in_files(model, empty)}
