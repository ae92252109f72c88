"""What a package's transport raises, and what only one of several workers receives, are transfers that failed."""

import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from quartet.v1 import rollout_pb2

from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.engines.weight_group import WeightGroupMixin
from quartet_rollout.errors import unpack_error
from quartet_rollout.weight_sync import receiver as receivers
from quartet_rollout.weight_sync.receiver import WeightReceiver

INFO = WeightGroupInfo("pigeon", "", 0, 1, 2, 1.0, b"secret", 3, {"loft": "north"})


def hawk(*_: Any) -> Any:
    raise KeyError("a hawk")


def join(receiver: WeightReceiver) -> None:
    receiver.begin_join(asdict(INFO), [])
    wait(receiver)


def receive(receiver: WeightReceiver) -> None:
    receiver.begin_receive(rollout_pb2.WeightManifest().SerializeToString(), 1.0, "")
    wait(receiver)


def wait(receiver: WeightReceiver) -> None:
    """Wait for the end of what was begun; raise its error and leave the group, as the engine does."""
    while (end := receiver.poll()) is None:
        time.sleep(0.001)
    if end[0]:
        receiver.leave()
        raise unpack_error(end)


def test_whatever_is_raised_is_a_transfer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pigeon = SimpleNamespace(rollout_end=hawk)
    monkeypatch.setattr(receivers, "load_transports", lambda: {"pigeon": pigeon})
    receiver = WeightReceiver("")
    with pytest.raises(WeightTransferError, match="a hawk"):
        join(receiver)
    pigeon.rollout_end = lambda _: SimpleNamespace(device=torch.device("cpu"), receive=hawk, close=lambda: None)
    join(receiver)
    with pytest.raises(WeightTransferError, match="a hawk"):
        receive(receiver)
    with pytest.raises(EngineError, match="in no weight group"):
        receive(receiver)


@pytest.mark.parametrize("received", [([3, 5], [3, 6]), ([3, 6], [3, 5])])
async def test_workers_that_received_different_bytes_leave_the_group(received: tuple) -> None:
    engine: Any = WeightGroupMixin("")
    engine._spec = Mock()  # it has been started, and whatever comes fits
    engine.call_members = AsyncMock(return_value=[["", checksums] for checksums in received])
    with pytest.raises(WeightTransferError, match="workers did not receive the same bytes"):
        await engine.receive_weights(rollout_pb2.WeightManifest(), 1.0)
    engine.call_members.assert_awaited_with("leave")
