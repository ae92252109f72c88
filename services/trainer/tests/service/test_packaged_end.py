"""The trainer's end of a transport that another package brings: what its code raises, and what becomes of that."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quartet_common.config import ConfigError
from quartet_common.transports import TransportParameters
from quartet_trainer.weight_sync import transports
from quartet_trainer.weight_sync.transports import PluginTransport, TransferFailed

Make = Callable[[Any], PluginTransport]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The transport of a package whose `trainer_end` gives or raises this."""

    def of(end: Any) -> PluginTransport:
        plugin = SimpleNamespace(name="pigeon", parameters=TransportParameters, trainer_end=Mock(side_effect=[end]))
        monkeypatch.setattr(transports, "load_transports", lambda: {"pigeon": plugin})
        return PluginTransport("pigeon", {}, "127.0.0.1", Path("unused"))

    return of


@pytest.fixture
def end() -> Mock:
    return Mock(spec=transports.TrainerEnd, device=torch.device("cpu"), libraries={})


def test_one_that_cannot_work_here_is_refused_before_the_training(make: Make):
    with pytest.raises(ConfigError, match="transport: pigeon is not possible here: no loft"):
        make(OSError("no loft"))
    with pytest.raises(ConfigError, match="gave a dict, which lacks device, libraries, invite, meet, close"):
        make({})


@pytest.mark.parametrize("error", [OSError("a hawk"), KeyError("a hawk"), RuntimeError("a hawk")])
def test_rollouts_that_cannot_be_met_are_a_group_that_did_not_come_about(make: Make, end: Mock, error: Exception):
    end.meet.side_effect = end.invite.side_effect = error
    with pytest.raises(RuntimeError, match="a hawk"):  # form_group makes a TransferFailed of it
        make(end).meet(1, b"secret", 2, 1.0)
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: .*a hawk"):
        make(end).invite(1)


@pytest.mark.parametrize("method", ["transfer", "carry"])  # its name in earlier releases
def test_what_goes_wrong_on_the_way_is_a_failed_transfer_and_what_the_learner_raises_is_not(
    make: Make, end: Mock, method: str
):
    end.meet.return_value = Mock(spec=[method, "drop"])
    channel, transfer = make(end).meet(1, b"secret", 2, 1.0), getattr(end.meet.return_value, method)
    transfer.side_effect = BrokenPipeError("a hawk")
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: BrokenPipeError: a hawk"):
        channel.transfer(Mock())
    for error in (TransferFailed("the time is over"), ValueError("of the learner")):
        transfer.side_effect = error
        with pytest.raises(type(error), match=str(error)):
            channel.transfer(Mock())
