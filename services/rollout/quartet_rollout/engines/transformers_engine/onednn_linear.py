"""Linear layers in float32 that multiply by oneDNN; see `quartet_common.onednn`."""

from typing import Any

import torch
from torch import Tensor, nn

from quartet_common.log import get_logger
from quartet_common.onednn import LEAST_PRODUCT, LEAST_ROWS, allow_onednn, known_rows

log = get_logger(__name__)

_matmul: Any = torch.backends.mkldnn.matmul


def use_onednn(model: nn.Module, device: torch.device) -> bool:
    """Have a float32 model's `nn.Linear` layers multiply by oneDNN, where it shall compute on the CPU.

    Not for a model under autocast: from now on oneDNN knows no bfloat16 in this process. False, and the model is as it
    was, where `allow_onednn` says no or oneDNN's products are not exact. They differ from MKL's in their last digits.
    """
    if device.type != "cpu" or any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    if not allow_onednn():
        return False
    if not _exact():
        log.info("oneDNN rounds products of float32 here: they are left to MKL")
        return False
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OnednnLinear
    return True


class OnednnLinear(nn.Linear):
    """A linear layer whose float32 products on the CPU, if they are large, are oneDNN's. It has no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear.forward`."""
        rows = input.numel() // self.in_features
        if (
            rows < LEAST_ROWS
            or rows * self.in_features * self.out_features < LEAST_PRODUCT
            or input.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(input)
        flat = input if input.dim() == 2 else input.reshape(rows, self.in_features)
        output = _product(flat, self.weight.t())
        if self.bias is not None:
            output.add_(self.bias)
        return output if input.dim() == 2 else output.view(*input.shape[:-1], self.out_features)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[rows, k] by [k, n]."""
    known = known_rows(left.shape[0])
    output = left.new_empty(left.shape[0], right.shape[1])
    with _Onednn():
        torch.mm(left[:known], right, out=output[:known])
    if known < left.shape[0]:
        torch.mm(left[known:], right, out=output[known:])
    return output


class _Onednn:
    """Products of float32 matrices within are oneDNN's. Not for attention, which multiplies many small ones."""

    def __enter__(self) -> None:
        self._before = _matmul.fp32_precision
        _matmul.fp32_precision = "bf16"

    def __exit__(self, *error: object) -> None:
        _matmul.fp32_precision = self._before


def _exact() -> bool:
    """Whether oneDNN's products are as near to float64's as MKL's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, right = torch.randn(256, 512), torch.randn(512, 256)
    exact = left.double() @ right.double()

    def error(found: Tensor) -> float:
        return (found - exact).abs().max().item()

    return error(_product(left, right)) <= 4 * error(left @ right)
