"""The store of weight groups: where it listens, and who meets there."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from quartet_common.config import ConfigError
from quartet_common.process_group import ProcessGroup, first_line
from quartet_trainer.config import WeightsSection
from quartet_trainer.publisher.store import WeightStore
from quartet_trainer.publisher.transport import create_transport

SECRET = bytes(range(16))


@pytest.fixture
def store():
    made = WeightStore("127.0.0.1")
    yield made
    made.close()


def test_it_listens_at_its_address_alone(store):
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening if each.laddr.port == store.port] == ["127.0.0.1"]


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
        ProcessGroup("gloo", store.epoch(1, SECRET), 0, 2, seconds=0.5, host="127.0.0.1")
    assert SECRET.hex() not in first_line(caught.value, SECRET)


def test_nccl_without_a_gpu_is_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="nccl is not possible here: there is no CUDA GPU on this machine"):
        create_transport(WeightsSection(transport="nccl"), store, tmp_path)


def test_a_key_of_an_earlier_release_is_let_pass():
    assert WeightsSection.model_validate({"allow_open_store": False}) == WeightsSection()
