"""The store of weight groups: where it listens, and who meets there; and what goes wrong in a package's transport."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError

from quartet_common.ports import AddressUnavailable
from quartet_trainer.weight_sync import transports
from quartet_trainer.weight_sync.group import Transfer, WeightGroup, form_group
from quartet_trainer.weight_sync.process_group import WeightStore
from quartet_trainer.weight_sync.transports import Files, TransferFailed, Transport
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


def test_a_store_whose_address_is_in_use_is_no_mistake_in_the_run_file(store):
    with pytest.raises(AddressUnavailable, match=f"store_host: cannot listen on 127.0.0.1:{store.port}: address alr"):
        WeightStore("127.0.0.1", store.port)


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
    group = ProcessGroup("gloo", store.epoch(1, SECRET), 0, 1, 20.0, host, interface)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    group.close(20.0)


def test_who_has_another_secret_meets_nobody_and_the_error_names_none(store):
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    store.epoch(1, SECRET).set("a key", "a value")
    stranger = dist.PrefixStore(f"quartet/1/{bytes(16).hex()}", client)
    assert not stranger.check(["a key"])
    with pytest.raises(RuntimeError) as caught:
        ProcessGroup("gloo", store.epoch(1, SECRET), 0, 2, 0.5, "127.0.0.1")
    assert SECRET.hex() not in first_line(caught.value, SECRET)


def test_what_goes_wrong_on_the_way_is_a_failed_transfer_and_what_the_learner_raises_is_not():
    channel = Mock(spec=["transfer", "drop"])
    group = WeightGroup("run", 1, {}, channel, lambda _: True, "pigeon")
    update = Transfer(group, 1, time.monotonic() + 1, Mock(), Mock())
    channel.transfer.side_effect = BrokenPipeError("a hawk")
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: BrokenPipeError: a hawk"):
        update.run()
    for error in (TransferFailed("the time is over"), ValueError("of the learner")):
        channel.transfer.side_effect = error
        with pytest.raises(type(error), match=str(error)):
            update.run()


def test_a_disk_that_is_full_is_a_failed_transfer_of_files(monkeypatch, tmp_path):
    monkeypatch.setattr(transports, "save_file", Mock(side_effect=SafetensorError("I/O error: disk full")))
    update = Mock(version=1, manifest=rollout_pb2.WeightManifest(bucket_bytes=[4]))
    update.buckets.return_value = [torch.zeros(4, dtype=torch.uint8)]
    with pytest.raises(TransferFailed, match="trainer.weights.folder .* cannot be written: I/O error: disk full"):
        Files(tmp_path).transfer(update)


def test_a_package_whose_end_cannot_invite_or_meet_is_a_group_that_did_not_come_about(store):
    end = Mock(spec=Transport, device=torch.device("cpu"), libraries={})

    def form():
        form_group("pigeon", end, store, "run", 1, {}, {}, 1.0, lambda _: True)

    end.invite.return_value, end.meet.side_effect = {}, KeyError("a hawk")
    with pytest.raises(TransferFailed, match="did not come about: transport 'pigeon' failed: KeyError: 'a hawk'"):
        form()
    end.invite.side_effect = OSError("no loft")
    with pytest.raises(TransferFailed, match="transport 'pigeon' failed: OSError: no loft"):
        form()
