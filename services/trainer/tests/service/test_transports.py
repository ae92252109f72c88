"""The store of weight groups: where it listens, and who meets there; and what goes wrong in a package's transport."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist

from quartet_common.config import ConfigError
from quartet_common.transports import TransportParameters
from quartet_trainer.config import WeightsSection, check_transport
from quartet_trainer.weight_sync import transports
from quartet_trainer.weight_sync.group import create_transport
from quartet_trainer.weight_sync.process_group import WeightStore, interface_address
from quartet_trainer.weight_sync.transports import PluginTransport, TransferFailed
from quartet_weights.process_group import ProcessGroup, first_line

SECRET = bytes(range(16))


@pytest.fixture
def store():
    made = WeightStore("127.0.0.1")
    yield made
    made.close()


def listening() -> set[tuple[str, int]]:
    """(address, port) of each socket that this process listens at."""
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def test_it_listens_at_its_address_alone(store):
    assert {address for address, port in listening() if port == store.port} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("127.0.0.1", ""),
        ("192.0.2.1", "lo"),  # no address of this machine
    ],
)
def test_a_rank_listens_at_its_address_or_interface_alone(store, host, interface):
    before = listening()
    group = ProcessGroup("gloo", store.epoch(1, SECRET), 0, 1, 20.0, host, interface)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    group.close(20.0)


def test_the_address_of_an_interface():
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"trainer.weights.interface: 'nowhere' has no address"):
        interface_address("nowhere")


def test_an_interface_that_is_not_there_is_refused_before_the_start():
    with pytest.raises(
        ConfigError, match=r"trainer.weights.interface: .* no network interface 'nowhere'; allowed:.* lo"
    ):
        check_transport(WeightsSection(interface="nowhere"))


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: address already in use"):
            WeightStore("127.0.0.1", port)


def test_who_has_another_secret_meets_nobody_and_the_error_names_none(store):
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    store.epoch(1, SECRET).set("a key", "a value")
    stranger = dist.PrefixStore(f"quartet/1/{bytes(16).hex()}", client)
    assert not stranger.check(["a key"])
    with pytest.raises(RuntimeError) as caught:
        ProcessGroup("gloo", store.epoch(1, SECRET), 0, 2, 0.5, "127.0.0.1")
    assert SECRET.hex() not in first_line(caught.value, SECRET)


def test_nccl_without_a_gpu_is_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="nccl is not possible here: there is no CUDA GPU on this machine"):
        create_transport(WeightsSection(transport="nccl"), store, tmp_path)


def test_a_key_of_an_earlier_release_is_let_pass():
    assert WeightsSection.model_validate({"allow_open_store": False}) == WeightsSection()


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
