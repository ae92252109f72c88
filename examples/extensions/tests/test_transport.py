"""Both ends of `sockets`: every rollout receives every bucket, or gets an error."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quartet_extensions.sockets import SocketReceiver, SocketSender

from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weight_sync import transports as rollout_transports

SECRET = b"sixteen bytes..."
BUCKETS = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100_000, 7, 3_000_000)]


class WeightUpdate:
    """The update that a trainer's publisher passes to a channel: buckets and callbacks."""

    began, checks = False, 0

    def buckets(self):
        yield from BUCKETS

    def begin(self, path=""):
        self.began = True

    def check(self):
        self.checks += 1


def info(invitation: dict[str, str], secret: bytes = SECRET) -> WeightGroupInfo:
    return WeightGroupInfo("sockets", "", 0, 1, 3, 20.0, secret, 5, invitation)


@pytest.fixture
def sender():
    made = SocketSender("127.0.0.1")
    yield made
    made.close()


def take(receiver: SocketReceiver, timeout: float = 20.0) -> list[torch.Tensor]:
    """Receive into new buckets; return a copy of each made when `arrived` was called."""
    mine, arrived = [torch.zeros_like(bucket) for bucket in BUCKETS], []
    receiver.fill(None, mine, "", timeout, lambda bucket: arrived.append(bucket.clone()))
    return arrived


def one_member(sender: SocketSender, pool: ThreadPoolExecutor):
    """Connect one rollout; return the channel to it, and the rollout's end."""
    invitation = sender.invite(5)
    meeting = pool.submit(sender.meet, 5, SECRET, 2, 20.0)
    return rollout_transports.join(info(invitation)), meeting.result(30)


def test_every_bucket_arrives_at_every_rollout(sender):
    with ThreadPoolExecutor(3) as pool:
        invitation = sender.invite(5)
        meeting = pool.submit(sender.meet, 5, SECRET, 3, 20.0)
        stranger = SocketReceiver(info(invitation, b"another secret.."))
        members = [SocketReceiver(info(invitation)) for _ in range(2)]
        channel, update = meeting.result(30), WeightUpdate()
        taken = [pool.submit(take, member) for member in members]
        channel.transfer(update)
        for one in taken:
            assert all(torch.equal(*pair) for pair in zip(one.result(30), BUCKETS, strict=True))
    assert update.began and update.checks >= 2 * len(BUCKETS)
    with pytest.raises(WeightTransferError, match="broke off"):
        take(stranger)
    channel.drop()
    for one in (stranger, *members):
        one.close()


def test_a_trainer_that_is_gone_or_silent_is_told(sender):
    with ThreadPoolExecutor(1) as pool:
        receiver, channel = one_member(sender, pool)
    with pytest.raises(WeightTransferError, match="did not come within 0.05 s"):
        take(receiver, timeout=0.05)
    channel.drop()
    with pytest.raises(WeightTransferError, match="broke off"):
        take(receiver)
    receiver.close()


def test_an_epoch_that_was_given_up_takes_no_member_of_the_next(sender):
    with ThreadPoolExecutor(2) as pool:
        first = sender.invite(4)
        given_up = pool.submit(sender.meet, 4, b"the last epoch's", 3, 20.0)
        SocketReceiver(info(first, b"the last epoch's"))  # one of two: it waits for the other
        receiver, channel = one_member(sender, pool)
        with pytest.raises(RuntimeError, match="next epoch began"):
            given_up.result(10)
        with pytest.raises(RuntimeError, match="next epoch began"):
            sender.meet(4, b"the last epoch's", 3, 20.0)
    channel.drop()
    receiver.close()
