"""Who reaches the weight store's port: strangers get nothing, members all, whatever strangers do."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from quartet_common.store_gate import GateError, StoreClient
from quartet_trainer.publisher import gate
from quartet_trainer.publisher.store import WeightStore

SECRET = bytes(range(16))
QUICK = timedelta(seconds=1)
SECONDS = 20.0


@pytest.fixture
def store() -> Iterator[WeightStore]:
    made = WeightStore("127.0.0.1")
    yield made
    made.close()


def member(store: WeightStore, epoch: int = 3, secret: bytes = SECRET) -> StoreClient:
    return StoreClient(store.host, store.port, epoch, secret, SECONDS)


def raw(store: WeightStore) -> dist.TCPStore:
    return dist.TCPStore(store.host, store.port, is_master=False, timeout=QUICK)


def connection(store: WeightStore) -> socket.socket:
    return socket.create_connection((store.host, store.port), SECONDS)


def test_members_and_rank_zero_see_each_others_keys_as_soon_as_they_are_there(store: WeightStore):
    mine, one, other, got = store.epoch(3, SECRET), member(store), member(store), []
    other.set("other", b"\0first")
    mine.set("zero", b"mine")
    assert one.get(["zero", "other"]) == [b"mine", b"\0first"]
    assert bytes(mine.get("other")) == b"\0first"
    asking = threading.Thread(target=lambda: got.extend(one.get(["late"])))
    asking.start()
    mine.set("late", b"here")
    asking.join(SECONDS)
    assert got == [b"here"]
    with pytest.raises(GateError, match=r"never did not come in 0.1 s"):
        one.get(["never"], timeout=0.1)
    assert one.get(["late"]) == [b"here"], "the connection is as good as before"


@pytest.mark.parametrize(("epoch", "secret"), [(3, b"another secret.."), (3, b""), (2, SECRET), (-1, SECRET)], ids=str)
def test_without_the_secret_of_the_present_epoch_nobody_gets_in(
    store: WeightStore, epoch: int, secret: bytes, caplog: pytest.LogCaptureFixture
):
    store.epoch(3, SECRET).set("key", b"value")
    with pytest.raises(GateError, match=f"does not let us into epoch {epoch}"):
        member(store, epoch, secret)
    assert member(store).get(["key"]) == [b"value"]
    assert store.gate.refused == 1
    (record,) = caplog.records
    assert record.message == "connection refused at the weight store" and record.why.startswith("127.0.0.1: ")
    assert SECRET.hex() not in str(record.__dict__) and str(SECRET) not in str(record.__dict__)


def test_the_secret_of_an_epoch_that_is_over_opens_nothing(store: WeightStore):
    old = store.epoch(3, SECRET)
    was_in = member(store)
    was_in.set("key", b"old")
    store.open(4, b"the next secret.")
    with pytest.raises(GateError):
        was_in.get(["key"])
    for epoch in (3, 4):
        with pytest.raises(GateError):
            member(store, epoch)
    new = member(store, 4, b"the next secret.")
    assert not store.epoch(4, b"the next secret.").check(["key"]) and old.check(["key"])
    store.end()
    with pytest.raises(GateError):
        new.get(["key"])
    for epoch in (3, 4):
        with pytest.raises(RuntimeError, match=f"epoch {epoch} of the weight group is over"):
            store.epoch(epoch, SECRET)


def test_silent_connections_keep_nobody_out(store: WeightStore):
    mine = store.epoch(3, SECRET)
    mine.set("key", b"value")
    first = member(store)
    silent = [connection(store) for _ in range(gate.MOST_STRANGERS + 10)]
    assert member(store).get(["key"]) == [b"value"]
    assert first.get(["key"]) == [b"value"], "who is in is no stranger"
    assert silent[0].recv(1) == b"", "the eldest stranger was put out"
    for each in silent:
        each.close()


def test_who_says_too_little_is_put_out(store: WeightStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "HANDSHAKE_SECONDS", 0.2)
    store.open(3, SECRET)
    for said in (b"", b"QTRT", b"QTRTGATE", b"QTRTGATE" + bytes(40)):
        with connection(store) as stranger:
            stranger.sendall(said)
            while stranger.recv(64):
                """A nonce comes for a whole hello."""
    assert store.gate.refused == 4


@pytest.mark.parametrize("operation", [b"S", b"G", b"X"])
def test_a_member_that_asks_for_nonsense_loses_its_connection_alone(store: WeightStore, operation: bytes):
    store.epoch(3, SECRET).set("key", b"value")
    wrong, well = member(store), member(store)
    wrong._link.send(operation, [b"alone"], SECONDS)
    with pytest.raises(GateError):
        wrong._link.receive(SECONDS)
    assert well.get(["key"]) == [b"value"]


def test_an_open_store_is_open_for_its_epoch_alone(store: WeightStore):
    store.open(3, SECRET, gated=False)
    mine, theirs = store.epoch(3, SECRET), raw(store)
    mine.set("key", b"value")
    assert dist.PrefixStore(f"quartet/3/{SECRET.hex()}", theirs).get("key") == b"value"
    store.open(4, SECRET)
    for gone in (theirs, mine):
        with pytest.raises(RuntimeError):
            gone.get("key")
    with pytest.raises(RuntimeError):
        raw(store).num_keys()
    assert not store.epoch(4, SECRET).check(["key"])
    member(store, 4).set("key", b"gated")
    store.open(5, SECRET, gated=False)
    assert raw(store).num_keys() >= 0, "and open again where it must be"


def test_closing_frees_the_port(store: WeightStore):
    for gated in (True, False):
        made = WeightStore("127.0.0.1")
        made.open(3, SECRET, gated)
        made.close()
        WeightStore("127.0.0.1", made.port).close()
