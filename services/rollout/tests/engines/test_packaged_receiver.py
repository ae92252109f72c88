"""The rollout's end of a transport that another package brings: what its code raises is a transfer that failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quartet.v1 import rollout_pb2

from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weight_sync import transports
from quartet_rollout.weight_sync.receiver import WeightReceiver

INFO = WeightGroupInfo("pigeon", "", 0, 1, 2, 1.0, b"secret", 3, {"loft": "north"})


def hawk(*_: Any) -> Any:
    raise KeyError("a hawk")


def test_whatever_is_raised_is_a_transfer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pigeon = SimpleNamespace(rollout_end=hawk)
    monkeypatch.setattr(transports, "plugin_names", lambda: ["pigeon"])
    monkeypatch.setattr(transports, "load_transports", lambda: {"pigeon": pigeon})
    receiver = WeightReceiver()
    with pytest.raises(WeightTransferError, match="a hawk"):
        receiver.join(INFO)
    pigeon.rollout_end = lambda _: SimpleNamespace(device=torch.device("cpu"), fill=hawk, close=lambda: None)
    receiver.join(INFO)
    with pytest.raises(WeightTransferError, match="a hawk"):
        receiver.receive(rollout_pb2.WeightManifest(), 1.0)
    with pytest.raises(EngineError, match="in no weight group"):
        receiver.receive(rollout_pb2.WeightManifest(), 1.0)
