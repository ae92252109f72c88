"""Linear layers in float32 that multiply by oneDNN on processors that gain by it, forwards and backwards.

Torch multiplies float32 matrices by MKL, and MKL takes AVX2 on processors that are not Intel's. oneDNN takes what there
is: on a Zen 5 it is twice as fast. Torch gives it float32 products only where they may be rounded to bfloat16
(`torch.backends.mkldnn.matmul.fp32_precision`), and nothing is to be rounded here. So oneDNN is told by its environment
of no instruction that knows bfloat16, whereupon it computes in float32.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quartet_common.log import get_logger

log = get_logger(__name__)

ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_BFLOAT16 = "AVX512_CORE"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
LEAST_PRODUCT = 1 << 22
"""Multiplications of a product that is worth it: a call of oneDNN takes some 20 µs more than one of MKL."""
LEAST_ROWS = 16

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
    """A linear layer whose float32 products on the CPU, if they are large, are oneDNN's."""

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
        if torch.is_grad_enabled():
            output = _Linear.apply(flat, self.weight, self.bias)
        else:
            output = _linear(flat, self.weight, self.bias)
        return output if input.dim() == 2 else output.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """[rows, in] by [out, in] to [rows, out]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _linear(input, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _product(gradient, weight) if wanted[0] else None,
            _sum_of_products(gradient.t(), input) if wanted[1] else None,
            gradient.sum(0) if wanted[2] else None,
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _product(input, weight.t())
    return output if bias is None else output.add_(bias)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[rows, k] by [k, n]."""
    known = known_rows(left.shape[0])
    output = left.new_empty(left.shape[0], right.shape[1])
    with _Onednn():
        torch.mm(left[:known], right, out=output[:known])
    if known < left.shape[0]:
        torch.mm(left[known:], right, out=output[known:])
    return output


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """[n, rows] by [rows, k]."""
    known = known_rows(right.shape[0])
    with _Onednn():
        output = torch.mm(left[:, :known], right[:known])
    return output.addmm_(left[:, known:], right[known:]) if known < right.shape[0] else output


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


def allow_onednn() -> bool:
    """Keep oneDNN from bfloat16 in this process, if it is faster than MKL here; before its first product.

    False where it is not, and where the environment sets ONEDNN_MAX_CPU_ISA to something else than AVX512_CORE.
    """
    return faster() and os.environ.setdefault(ISA, _WITHOUT_BFLOAT16) == _WITHOUT_BFLOAT16


def faster() -> bool:
    """Whether MKL does not use what the processor can do: AVX-512 of AMD's."""
    if sys.platform != "linux":
        return False
    processor = Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in processor and set(processor.split()) >= _AVX512


def known_rows(rows: int) -> int:
    """The largest number up to `rows` of which there are few: 16 between a power of two and the next.

    oneDNN makes a program for each shape that it meets, which takes as long as a small product. Numbers of rows hardly
    ever come again, so it is given numbers that do; the rows that are left are MKL's.
    """
    step = max(LEAST_ROWS, (1 << rows.bit_length()) // 32)
    return rows // step * step
