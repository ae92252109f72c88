"""The trainer's end of a transport that another package brings: what its code raises, and what becomes of that."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quartet_common.config import ConfigError
from quartet_common.transports import TransportParameters
from quartet_trainer.publisher import packaged
from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.packaged import Packaged


class Channel:
    """Raises what the carriage says."""

    def carry(self, carriage: Any) -> int:
        raise carriage

    def drop(self, wait: float = 0.0) -> None:
        """There is nothing to leave."""


class End:
    device, libraries = torch.device("cpu"), {"doves": "1"}

    def __init__(self, wrong: dict[str, Exception]):
        self.wrong, self.closed = wrong, False

    def invite(self, epoch: int) -> dict[str, str]:
        if "invite" in self.wrong:
            raise self.wrong["invite"]
        return {"epoch": str(epoch)}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Channel:
        if "meet" in self.wrong:
            raise self.wrong["meet"]
        return Channel()

    def close(self) -> None:
        self.closed = True


class Pigeon:
    name = "pigeon"
    parameters = TransportParameters

    def __init__(self, end: Any):
        self.end = end

    def trainer_end(self, parameters: Any, host: str, folder: Path) -> Any:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def made(monkeypatch: pytest.MonkeyPatch, end: Any) -> Packaged:
    monkeypatch.setattr(packaged, "load_transports", lambda: {"pigeon": Pigeon(end)})
    return Packaged("pigeon", {}, "127.0.0.1", Path("unused"))


def test_its_end_is_a_transport_that_invites(monkeypatch: pytest.MonkeyPatch):
    end = End({})
    transport = made(monkeypatch, end)
    assert (transport.name, transport.invite(3), transport.libraries) == ("pigeon", {"epoch": "3"}, {"doves": "1"})
    transport.close()
    assert end.closed


def test_one_that_cannot_work_here_is_refused_before_the_training(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="transport: pigeon is not possible here: no loft"):
        made(monkeypatch, OSError("no loft"))
    with pytest.raises(ConfigError, match="gave a dict, which lacks device, libraries, invite, meet, close"):
        made(monkeypatch, {})


@pytest.mark.parametrize("error", [OSError("a hawk"), KeyError("a hawk"), RuntimeError("a hawk")])
def test_rollouts_that_cannot_be_met_are_a_group_that_did_not_come_about(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    with pytest.raises(RuntimeError, match="a hawk"):  # form_group makes a TransferFailed of it
        made(monkeypatch, End({"meet": error})).meet(1, b"secret", 2, 1.0)
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: .*a hawk"):
        made(monkeypatch, End({"invite": error})).invite(1)


def test_what_goes_wrong_on_the_way_is_a_failed_transfer_and_what_the_learner_raises_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    channel = made(monkeypatch, End({})).meet(1, b"secret", 2, 1.0)
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: BrokenPipeError: a hawk"):
        channel.carry(BrokenPipeError("a hawk"))
    for error in (TransferFailed("the time is over"), ValueError("of the learner")):
        with pytest.raises(type(error), match=str(error)):
            channel.carry(error)
