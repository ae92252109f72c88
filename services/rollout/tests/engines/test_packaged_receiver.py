"""The rollout's end of a transport that another package brings: what its code raises is a transfer that failed."""

import pytest
import torch
from quartet.v1 import rollout_pb2

from quartet_common.config import ConfigError
from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weight_sync import transports
from quartet_rollout.weight_sync.receiver import WeightReceiver

INFO = WeightGroupInfo("pigeon", "", 0, 1, 2, 1.0, b"secret", 3, {"loft": "north"})


class End:
    device = torch.device("cpu")

    def __init__(self, error: Exception):
        self.error = error

    def fill(self, manifest, buckets, path, timeout_seconds, arrived) -> None:
        raise self.error

    def close(self) -> None:
        """Nothing to leave."""


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch):
    """Join by a transport whose `rollout_end` gives what it is told to, or raises it."""

    class Pigeon:
        def rollout_end(self, info):
            assert info.invitation == {"loft": "north"}
            if isinstance(self.end, Exception):
                raise self.end
            return self.end

    def joined(end) -> WeightReceiver:
        Pigeon.end = end
        receiver = WeightReceiver()
        receiver.join(INFO)
        return receiver

    monkeypatch.setattr(transports, "plugin_names", lambda: ["pigeon"])
    monkeypatch.setattr(transports, "load_transports", lambda: {"pigeon": Pigeon()})
    return joined


@pytest.mark.parametrize("error", [OSError("a hawk"), KeyError("a hawk"), WeightTransferError("a hawk")])
def test_whatever_is_raised_is_a_transfer_that_failed(join, error):
    with pytest.raises(WeightTransferError, match="a hawk"):
        join(error)
    receiver = join(End(error))
    with pytest.raises(WeightTransferError, match="a hawk"):
        receiver.receive(rollout_pb2.WeightManifest(), 1.0)
    with pytest.raises(EngineError, match="in no weight group"):
        receiver.receive(rollout_pb2.WeightManifest(), 1.0)


def test_what_is_no_transport_is_said(join, monkeypatch):
    with pytest.raises(EngineError, match="rollout_end gave a dict, which lacks device, fill, close"):
        join({})

    def broken():
        raise ConfigError("entry point pigeon:Pigeon: cannot be loaded")

    monkeypatch.setattr(transports, "load_transports", broken)
    with pytest.raises(EngineError, match="cannot be loaded"):
        join({})
