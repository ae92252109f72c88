"""Linear layers by oneDNN: the same function as torch's own, and only where it is exact."""

import pytest
import torch
from torch import nn

from quartet_weights import onednn_linear
from quartet_weights.onednn_linear import ISA, OnednnLinear, allow_onednn, known_rows, use_onednn

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


@pytest.mark.parametrize("shape", [(700, 128), (3, 333, 128), (1, 1100, 128), (515, 1, 128), (5, 128), (5, 1, 128)])
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


def test_a_gradient_that_is_one_number_everywhere_of_an_output_that_is_changed_in_place():
    layer, exact = layers(128, 256)
    layer.bias.requires_grad_(False)
    input = torch.randn(700, 128, requires_grad=True)
    layer(input).div_(2.0).sum().backward()
    exact(input.detach().double()).div(2.0).sum().backward()
    torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(input.grad, layer.weight.sum(0).div(2.0).expand(700, 128))
    assert layer.bias.grad is None


def test_autocast_has_its_way():
    layer, _ = layers(128, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(700, 128)).dtype == torch.bfloat16


def test_known_numbers_of_rows_are_onednns_and_other_products_are_left_as_they_were(monkeypatch):
    layer, _ = layers(128, 256)
    before, asked, mm = torch.backends.mkldnn.matmul.fp32_precision, [], torch.mm

    def noting(left, right, **options):
        asked.append((len(left), torch.backends.mkldnn.matmul.fp32_precision))
        return mm(left, right, **options)

    monkeypatch.setattr(torch, "mm", noting)
    output = layer(torch.randn(700, 128))
    assert asked == [(672, "bf16"), (28, before)]
    output.sum().backward()
    assert asked[2:] == [(256, "bf16")]  # the input has no gradient
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_layer_that_becomes_another_type_is_torchs_again():
    layer, exact = layers(128, 256)
    input = torch.randn(700, 128, dtype=torch.float64)
    torch.testing.assert_close(layer.double()(input), exact(input), rtol=0, atol=0)


def rounded(left, right):
    return (left.bfloat16() @ right.bfloat16()).float()


@pytest.mark.parametrize(
    ("dtype", "device", "isa", "product"),
    [
        (torch.float64, "cpu", "AVX512_CORE", None),
        (torch.bfloat16, "cpu", "AVX512_CORE", None),
        (torch.float32, "cuda", "AVX512_CORE", None),
        (torch.float32, "cpu", "ALL", None),  # as the user has set it
        (torch.float32, "cpu", "AVX512_CORE", rounded),
    ],
    ids=["float64", "bfloat16", "a GPU", "another instruction set", "a processor that rounds"],
)
def test_elsewhere_a_layer_is_torchs(monkeypatch, dtype, device, isa, product):
    monkeypatch.setenv(ISA, isa)
    if product:
        monkeypatch.setattr(onednn_linear, "_product", product)
    layer = nn.Linear(8, 8, dtype=dtype)
    assert not use_onednn(layer, torch.device(device))
    assert type(layer) is nn.Linear


def test_few_shapes_for_many_numbers_of_rows():
    known = {rows: known_rows(rows) for rows in range(16, 4096)}
    assert all(0 <= rows - of_them <= max(15, rows / 16) for rows, of_them in known.items())
    assert len(set(known.values())) <= 16 * 5


@pytest.mark.parametrize(
    ("faster", "before", "allowed", "after"),
    [
        (True, None, True, "AVX512_CORE"),
        (True, "AVX512_CORE", True, "AVX512_CORE"),
        (True, "ALL", False, "ALL"),
        (False, None, False, None),
    ],
)
def test_the_environment_has_its_way(monkeypatch, faster, before, allowed, after):
    monkeypatch.setattr(onednn_linear, "faster", lambda: faster)
    monkeypatch.setenv(ISA, "")
    monkeypatch.delenv(ISA)
    if before is not None:
        monkeypatch.setenv(ISA, before)
    assert allow_onednn() is allowed
    assert onednn_linear.os.environ.get(ISA) == after
