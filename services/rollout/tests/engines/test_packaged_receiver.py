"""The rollout's end of a transport that another package brings: what its code raises is a transfer that failed."""

import pytest
import torch

from quartet_common.config import ConfigError
from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weight_sync import transports
from quartet_rollout.weight_sync.transports import PluginTransport

INFO = WeightGroupInfo("pigeon", "", 0, 1, 2, 1.0, b"secret", 3, {"loft": "north"})


class End:
    device = torch.device("cpu")

    def __init__(self, error: Exception):
        self.error = error

    def fill(self, manifest, buckets, path, timeout_seconds, arrived) -> None:
        raise self.error

    def close(self) -> None:
        """Nothing to leave."""


def joined(monkeypatch: pytest.MonkeyPatch, end) -> PluginTransport:
    class Pigeon:
        def rollout_end(self, info):
            assert info.invitation == {"loft": "north"}
            if isinstance(end, Exception):
                raise end
            return end

    monkeypatch.setattr(transports, "load_transports", lambda: {"pigeon": Pigeon()})
    return PluginTransport(INFO)


@pytest.mark.parametrize("error", [OSError("a hawk"), KeyError("a hawk"), WeightTransferError("a hawk")])
def test_whatever_is_raised_is_a_transfer_that_failed(monkeypatch, error):
    with pytest.raises(WeightTransferError, match="a hawk"):
        joined(monkeypatch, error)
    with pytest.raises(WeightTransferError, match="a hawk"):
        joined(monkeypatch, End(error)).fill(None, [], "", 1.0, lambda bucket: None)


def test_what_is_no_transport_is_said(monkeypatch):
    with pytest.raises(EngineError, match="rollout_end gave a dict, which lacks device, fill, close"):
        joined(monkeypatch, {})

    def broken():
        raise ConfigError("entry point pigeon:Pigeon: cannot be loaded")

    monkeypatch.setattr(transports, "load_transports", broken)
    with pytest.raises(EngineError, match="cannot be loaded"):
        PluginTransport(INFO)
