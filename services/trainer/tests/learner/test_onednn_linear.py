"""Linear layers by oneDNN: the same function as torch's own, and only where it is exact."""

import pytest
import torch
from torch import nn

from quartet_weights import onednn_linear
from quartet_weights.onednn_linear import ISA, OnednnLinear, use_onednn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """As on a processor that gains by it. On others the same products are MKL's."""
    monkeypatch.setattr(onednn_linear, "faster", lambda: True)
    monkeypatch.setenv(ISA, "AVX512_CORE")


def layers(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A layer that multiplies by oneDNN, and the same in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias)
    exact = nn.Linear(inputs, outputs, bias).double()
    exact.load_state_dict(layer.state_dict())
    assert use_onednn(layer, CPU)
    assert type(layer) is OnednnLinear
    return layer, exact


@pytest.mark.parametrize("shape", [(700, 128), (3, 333, 128), (515, 1, 128), (5, 128)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_float64(shape, bias):
    layer, exact = layers(128, 256, bias)
    input = torch.randn(shape, requires_grad=True)
    same = input.detach().double().requires_grad_()
    gradient = torch.randn(*shape[:-1], 256)
    output = layer(input)
    output.backward(gradient)
    expected = exact(same)
    expected.backward(gradient.double())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(input.grad.double(), same.grad, rtol=0, atol=1e-5)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), exact.get_parameter(name).grad, rtol=1e-5, atol=2e-4)
    with torch.no_grad():
        torch.testing.assert_close(layer(input), output)


def rounded(left, right):
    return (left.bfloat16() @ right.bfloat16()).float()


@pytest.mark.parametrize(
    ("dtype", "device", "isa", "product"),
    [
        (torch.float64, "cpu", "AVX512_CORE", None),
        (torch.float32, "cuda", "AVX512_CORE", None),
        (torch.float32, "cpu", "ALL", None),  # as the user has set it
        (torch.float32, "cpu", "AVX512_CORE", rounded),
    ],
    ids=["float64", "a GPU", "another instruction set", "a processor that rounds"],
)
def test_elsewhere_a_layer_is_torchs(monkeypatch, dtype, device, isa, product):
    monkeypatch.setenv(ISA, isa)
    if product:
        monkeypatch.setattr(onednn_linear, "_product", product)
    layer = nn.Linear(8, 8, dtype=dtype)
    assert not use_onednn(layer, torch.device(device))
    assert type(layer) is nn.Linear
