"""Both ends of `sockets`: every rollout receives every bucket, or gets an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quartet_extensions.sockets import SocketReceiver, SocketSender

from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weight_sync.receiver import join

SECRET = b"sixteen bytes..."
BUCKETS = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100_000, 7, 3_000_000)]


class Group:
    """The group that a trainer's publisher passes to `send`."""

    def __init__(self, rollouts: int, epoch: int = 5, secret: bytes = SECRET):
        self.epoch, self.world_size, self.secret = epoch, 1 + rollouts, secret
        self.checks, self.given_up = 0, threading.Event()

    def check(self):
        self.checks += 1
        if self.given_up.is_set():
            raise RuntimeError("a rollout is gone")


def info(invitation: dict[str, str], secret: bytes = SECRET) -> WeightGroupInfo:
    return WeightGroupInfo("sockets", "", 0, 1, 3, 20.0, secret, 5, invitation)


@pytest.fixture
def sender():
    made = SocketSender("127.0.0.1")
    yield made
    made.close()


def take(receiver: SocketReceiver, timeout: float = 20.0) -> list[torch.Tensor]:
    """Receive into new buckets; return a copy of each made when it had come."""
    mine = [torch.zeros_like(bucket) for bucket in BUCKETS]
    return [bucket.clone() for bucket in receiver.receive(None, mine, "", timeout)]


def are_here(taken: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(taken, BUCKETS, strict=True))


def test_every_bucket_arrives_at_every_rollout(sender):
    with ThreadPoolExecutor(2) as pool:
        stranger = SocketReceiver(info(sender.invitation, b"another secret.."))
        members = [join(info(sender.invitation)) for _ in range(2)]
        group = Group(rollouts=2)
        for _ in range(2):  # the second update takes the same connections
            taken = [pool.submit(take, member) for member in members]
            sender.send(group, iter(BUCKETS))
            assert all(are_here(one.result(30)) for one in taken)
    assert group.checks >= 2 * 2 * len(BUCKETS)
    with pytest.raises(WeightTransferError, match="broke off"):
        take(stranger)
    for one in (stranger, *members):
        one.close()


def test_a_trainer_that_is_gone_or_silent_is_told(sender):
    receiver = SocketReceiver(info(sender.invitation))
    sender.send(Group(rollouts=1), iter(()))
    with pytest.raises(WeightTransferError, match="did not come within 0.05 s"):
        take(receiver, timeout=0.05)
    sender.close()
    with pytest.raises(WeightTransferError, match="broke off"):
        take(receiver)
    receiver.close()


def test_an_epoch_that_was_given_up_takes_no_member_of_the_next(sender):
    lonely = SocketReceiver(info(sender.invitation, b"the last epoch's"))  # one of two
    first = Group(rollouts=2, epoch=4, secret=b"the last epoch's")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, first, iter(BUCKETS))
        first.given_up.set()
        with pytest.raises(RuntimeError, match="a rollout is gone"):
            sending.result(10)
        receiver = SocketReceiver(info(sender.invitation))
        taken = pool.submit(take, receiver)
        sender.send(Group(rollouts=1), iter(BUCKETS))
        assert are_here(taken.result(30))
    with pytest.raises(WeightTransferError, match="broke off"):
        take(lonely)
    for one in (lonely, receiver):
        one.close()
