"""Both ends of `sockets`: every bucket arrives at every rollout, with the checksum that the trainer announces."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quartet_extensions.sockets import SocketReceiver, Sockets

from quartet_common.weights import Checksum
from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError

SECRET = b"sixteen bytes..."
BUCKETS = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100_000, 7, 3_000_000)]


class Carriage:
    """What a trainer's publisher gives a channel: the buckets, and whom to tell."""

    def __init__(self):
        self.began, self.checks = False, 0

    def buckets(self):
        yield from BUCKETS

    def begin(self, path=""):
        self.began = True

    def check(self):
        self.checks += 1


def info(transport: Sockets, secret: bytes = SECRET) -> WeightGroupInfo:
    return WeightGroupInfo("gloo", transport.host, transport.port, 1, 3, 20.0, secret, 5)


@pytest.fixture
def transport():
    made = Sockets("127.0.0.1")
    yield made
    made.close()


def take(receiver: SocketReceiver, timeout: float = 20.0) -> tuple[list[torch.Tensor], int]:
    """Receive into fresh buckets; return them with the checksum of what arrived."""
    mine, checksum = [torch.zeros_like(bucket) for bucket in BUCKETS], Checksum()
    receiver.fill(None, mine, "", timeout, lambda bucket: checksum.update(memoryview(bucket.numpy())))
    return mine, checksum.value()


def test_every_bucket_arrives_at_every_rollout(transport):
    with ThreadPoolExecutor(3) as pool:
        meeting = pool.submit(transport.meet, 5, SECRET, 3, 20.0)
        stranger = SocketReceiver(info(transport, b"another secret.."))
        members = [SocketReceiver(info(transport)) for _ in range(2)]
        channel, carriage = meeting.result(30), Carriage()
        taken = [pool.submit(take, member) for member in members]
        announced = channel.carry(carriage)
        for mine, checksum in (one.result(30) for one in taken):
            assert checksum == announced and all(map(torch.equal, mine, BUCKETS))
    assert carriage.began and carriage.checks == 2 * len(BUCKETS)
    with pytest.raises(WeightTransferError, match="broke off"):
        take(stranger)
    channel.drop()
    for one in (stranger, *members):
        one.close()


def test_a_trainer_that_is_gone_or_silent_is_told(transport):
    meeting = threading.Thread(target=lambda: met.append(transport.meet(5, SECRET, 2, 20.0)))
    met: list = []
    meeting.start()
    receiver = SocketReceiver(info(transport))
    meeting.join(30)
    with pytest.raises(WeightTransferError, match="did not come within 0.05 s"):
        take(receiver, timeout=0.05)
    met[0].drop()
    with pytest.raises(WeightTransferError, match="broke off"):
        take(receiver)
    receiver.close()


def test_rollouts_that_do_not_come_are_not_waited_for_for_ever(transport):
    with pytest.raises(RuntimeError, match="0 of 2 rollouts came within 0.05 s"):
        transport.meet(5, SECRET, 3, 0.05)
