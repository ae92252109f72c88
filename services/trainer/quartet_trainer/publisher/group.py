"""The group that weights travel by: the trainer, rank 0, and some rollouts, for one epoch.

A group is never repaired: when a member fails it is dropped, and one of a higher epoch is made.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quartet.v1 import broker_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_trainer.publisher.calls import LOOK_SECONDS, TransferFailed, gather
from quartet_trainer.publisher.packaged import Packaged
from quartet_trainer.publisher.store import JOIN_SECONDS, WeightStore
from quartet_trainer.publisher.transport import Channel, Transport
from quartet_weights.process_group import first_line

log = get_logger(__name__)


@dataclass(frozen=True)
class WeightGroup:
    """One epoch's group: some rollouts, and the channel to them."""

    epoch: int
    members: Mapping[str, broker_pb2.Member]
    channel: Channel


def form_group(
    transport: Transport,
    store: WeightStore,
    run_id: str,
    epoch: int,
    members: Mapping[str, broker_pb2.Member],
    stubs: Mapping[str, rollout_pb2_grpc.RolloutServiceStub],
    ranks: dict[str, int],
    timeout: float,
    alive: Callable[[str], bool],
) -> WeightGroup:
    """Make the group of an epoch: rank 0 here, while every rollout joins at once.

    Args:
        ranks: ranks that each rollout takes (its tensor-parallel size), 1 where unknown; corrected by its answer.
        timeout: deadline of each operation in the group, in seconds.

    Raises:
        TransferFailed: a rollout did not join, or takes another number of ranks than thought.
    """
    secret = secrets.token_bytes(16)
    invitation = transport.invite(epoch) if isinstance(transport, Packaged) else {}
    deadline = time.monotonic() + JOIN_SECONDS
    world_size = 1 + sum(ranks.get(name, 1) for name in members)
    result: list[Channel | RuntimeError] = []
    formed, abandoned = threading.Event(), threading.Event()

    def meet() -> None:
        try:
            result.append(transport.meet(epoch, secret, world_size, timeout))
        except RuntimeError as error:
            result.append(error)
        if abandoned.is_set():
            result.clear()
        formed.set()

    threading.Thread(target=meet, name=f"weight-group-{epoch}", daemon=True).start()
    calls, rank = {}, 1
    for name in members:
        request = rollout_pb2.JoinWeightGroupRequest(
            run_id=run_id,
            group_epoch=epoch,
            transport=transport.code,
            store_host=store.host,
            store_port=store.port,
            rank=rank,
            world_size=world_size,
            timeout=to_duration(timeout),
            libraries=transport.libraries,
            secret=secret,
            transport_name=transport.name if isinstance(transport, Packaged) else "",
            invitation=invitation,
        )
        calls[name] = stubs[name].JoinWeightGroup.future(request, timeout=JOIN_SECONDS)
        rank += ranks.get(name, 1)
    try:
        answers = gather(calls, deadline, alive)
        answers.raise_if_bad(f"joining weight group {epoch}")
        wrong = {
            name: answer.ranks for name, answer in answers.good.items() if max(1, answer.ranks) != ranks.get(name, 1)
        }
        if wrong:
            ranks.update(wrong)
            raise TransferFailed(f"weight group {epoch} has other ranks than thought: {wrong}")
        while not formed.wait(LOOK_SECONDS):
            gone = [name for name in members if not alive(name)]
            if gone or time.monotonic() > deadline:
                raise TransferFailed(f"weight group {epoch} did not come about", dict.fromkeys(gone, "is gone"))
    except TransferFailed:
        abandoned.set()
        raise
    channel = result.pop()
    if isinstance(channel, RuntimeError):
        raise TransferFailed(f"weight group {epoch} did not come about: {first_line(channel, secret)}")
    log.info("weight group made", extra={"epoch": epoch, "ranks": world_size, "transport": transport.name})
    return WeightGroup(epoch, dict(members), channel)
