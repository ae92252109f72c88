"""The transformers engine's linear layers by oneDNN: the same function as torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quartet_common import onednn
from quartet_rollout.engines.transformers_engine import onednn_linear
from quartet_rollout.engines.transformers_engine.onednn_linear import OnednnLinear, use_onednn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that gains by it. On others the same products are MKL's."""
    monkeypatch.setattr(onednn, "faster", lambda: True)
    monkeypatch.setenv(onednn.ISA, "AVX512_CORE")


@pytest.mark.parametrize("shape", [(256, 1, 128), (3, 333, 128), (5, 1, 128)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_those_of_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, exact = nn.Linear(128, 256, bias), nn.Linear(128, 256, bias).double()
    exact.load_state_dict(layer.state_dict())
    assert use_onednn(layer, CPU)
    assert type(layer) is OnednnLinear
    given = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(layer(given).double(), exact(given.double()), rtol=0, atol=1e-5)


def test_a_processor_that_would_round_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.bfloat16() @ right.bfloat16()).float()

    monkeypatch.setattr(onednn_linear, "_product", rounded)
    layer = nn.Linear(8, 8)
    assert not use_onednn(layer, CPU)
    assert type(layer) is nn.Linear
