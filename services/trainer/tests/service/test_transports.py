"""The store of weight groups: where it listens, and who meets there; and what goes wrong in a package's transport."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError

from quartet_common.config import ConfigError
from quartet_common.ports import AddressUnavailable
from quartet_server.transports import TransportParameters
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync import files, transports
from quartet_trainer.weight_sync.files import Files
from quartet_trainer.weight_sync.rollouts import TransferFailed, WeightGroup
from quartet_trainer.weight_sync.transports import Broadcast, form_group
from quartet_weights.process_group import ProcessGroup, epoch_store, first_line

SECRET = bytes(range(16))


@pytest.fixture
def store():
    made = Broadcast("gloo", "127.0.0.1")
    yield made
    made.close()


def epoch_1(store: Broadcast) -> dist.Store:
    return epoch_store(store.host, store.port, 1, SECRET, 20.0)


def listening() -> set[tuple[str, int]]:
    """(address, port) of each socket that this process listens at."""
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def test_a_store_whose_address_is_in_use_is_no_mistake_in_the_run_file(store):
    with pytest.raises(AddressUnavailable, match=f"store_host: cannot listen on 127.0.0.1:{store.port}: address alr"):
        Broadcast("gloo", "127.0.0.1", store.port)


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("127.0.0.1", ""),
        ("192.0.2.1", "lo"),  # no address of this machine
    ],
)
def test_store_and_rank_listen_at_their_address_or_interface_alone(store, host, interface):
    before = listening()
    assert {address for address, port in before if port == store.port} == {"127.0.0.1"}
    group = ProcessGroup("gloo", epoch_1(store), 0, 1, 20.0, host, interface)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    group.close(20.0)


def test_who_has_another_secret_meets_nobody_and_the_error_names_none(store):
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    epoch_1(store).set("a key", "a value")
    stranger = dist.PrefixStore(f"quartet/1/{bytes(16).hex()}", client)
    assert not stranger.check(["a key"])
    with pytest.raises(RuntimeError) as caught:
        ProcessGroup("gloo", epoch_1(store), 0, 2, 0.5, "127.0.0.1")
    assert SECRET.hex() not in first_line(caught.value, SECRET)


def group(**changes) -> WeightGroup:
    fields = {"run_id": "run", "epoch": 1, "world_size": 1, "seconds": 1.0, "rollouts": {}, "alive": lambda _: True}
    return WeightGroup(**fields | {"deadline": time.monotonic() + 20} | changes)


def test_check_raises_at_the_deadline_and_for_a_member_that_is_gone():
    group().check()
    with pytest.raises(TransferFailed, match="did not go through in time"):
        group(deadline=0.0).check()
    with pytest.raises(TransferFailed, match="given up; one: is gone") as caught:
        group(rollouts={"one": Mock()}, alive=lambda _: False).check()
    assert caught.value.blame == {"one": "is gone"}


def test_a_disk_that_is_full_is_a_failed_transfer_of_files(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "save_file", Mock(side_effect=SafetensorError("I/O error: disk full")))
    buckets, manifest = [torch.zeros(4, dtype=torch.uint8)], rollout_pb2.WeightManifest(bucket_bytes=[4])
    with pytest.raises(TransferFailed, match="trainer.weights.folder .* cannot be written: I/O error: disk full"):
        Files(tmp_path).write(group(), buckets, 1, manifest)


def test_a_process_group_that_cannot_be_made_is_a_group_that_failed_to_form(monkeypatch, store):
    monkeypatch.setattr(transports, "epoch_store", Mock(side_effect=RuntimeError("no loft\nand a stack trace")))
    with pytest.raises(TransferFailed, match="weight group 1 failed to form: no loft$"):
        form_group("gloo", store, group())


def test_a_package_whose_end_fails_or_lacks_a_method_is_a_mistake_in_the_run_file(monkeypatch, tmp_path):
    pigeon = SimpleNamespace(parameters=TransportParameters, trainer_end=Mock(side_effect=OSError("no loft")))
    monkeypatch.setattr(transports, "load_transports", lambda: {"pigeon": pigeon})
    settings = WeightsSection.model_construct(transport="pigeon", transport_parameters={})
    with pytest.raises(ConfigError, match="pigeon is not possible here: no loft"):
        transports.create_transport(settings, "127.0.0.1", tmp_path)
    pigeon.trainer_end = Mock(return_value=SimpleNamespace(device=torch.device("cpu"), libraries={}, close=Mock()))
    with pytest.raises(ConfigError, match="returned a SimpleNamespace, which lacks invitation, send"):
        transports.create_transport(settings, "127.0.0.1", tmp_path)
