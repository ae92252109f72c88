"""Linear layers on the CPU whose weights are laid out for the matrix product once, rather than in each product.

torch's `linear` gives float32 to MKL (aten/src/ATen/native/Linear.cpp of torch 2.13), which lays out the weight in each
call: with the few rows of a decode step that takes as long as the product. oneDNN keeps the layout. Its operators have
no public name; `torch.compile` emits them for frozen weights (torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from functools import partial

import torch
from torch import nn

_SMALLEST = 2**18
"""Elements of a weight: below, calling the operator costs more than it saves."""
_ROWS = 32
"""Of the products that the layout is made for; others are computed with it too."""


def pack_linears(model: nn.Module) -> None:
    """Let the large float32 linear layers compute with a packed copy of the weights that they have now.

    To be called again whenever weights change. `model` is on the CPU and computes no gradients.
    """
    for layer in model.modules() if torch.backends.mkldnn.is_available() else ():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.numel() >= _SMALLEST:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _ROWS)
            layer.forward = partial(_linear, packed, layer.bias)


def _linear(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
