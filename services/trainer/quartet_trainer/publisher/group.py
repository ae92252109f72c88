"""The process group that weights travel by: its own store, its own epoch, no part of the default group.

The trainer is rank 0. A group is never repaired: when a member fails it is dropped, and one of a higher epoch is made.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from quartet.v1 import broker_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.config import ConfigError
from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_trainer.publisher.calls import LOOK_SECONDS, TransferFailed, gather

log = get_logger(__name__)

# Making a group is a matter of a second; a rollout that takes longer is not well.
JOIN_SECONDS = 20.0


class WeightStore:
    """The TCPStore of all epochs, listening at one address only. Each epoch has its own secret prefix."""

    def __init__(self, host: str, port: int = 0):
        """Listen at host:port; port 0 takes a free one.

        Raises:
            ConfigError: the address is not to be had.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise ConfigError(
                f"trainer.weights.store_host: cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # TCPStore by itself listens on all interfaces; given a socket it keeps to that, and owns it from here on.
        self._store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
            master_listen_fd=listener.detach(),
        )

    def epoch(self, epoch: int, secret: bytes) -> dist.PrefixStore:
        """Return the part of the store that belongs to one group."""
        return dist.PrefixStore(f"quartet/{epoch}/{secret.hex()}", self._store)


class WeightGroup:
    """One epoch's process group: the trainer and some rollouts."""

    def __init__(self, epoch: int, members: Mapping[str, broker_pb2.Member], group: dist.ProcessGroupGloo):
        self.epoch = epoch
        self.members = dict(members)
        self._group: dist.ProcessGroupGloo | None = group

    def broadcast(self, bucket: torch.Tensor) -> Callable[[float, Callable[[], str]], None]:
        """Begin to send a bucket, uint8, to all. Returns a function that waits for the end of it.

        That function takes a deadline (time.monotonic) and a check that names a member that is gone, or nothing; it
        raises TransferFailed.
        """
        assert self._group is not None, "the group was dropped"
        done = threading.Event()
        work = self._group.broadcast([bucket], dist.BroadcastOptions())
        work.get_future().add_done_callback(lambda _: done.set())

        def wait(deadline: float, gone: Callable[[], str]) -> None:
            while not done.wait(LOOK_SECONDS):
                if time.monotonic() > deadline:
                    raise TransferFailed("the broadcast did not end in time")
                if name := gone():
                    raise TransferFailed("the broadcast was given up", {name: "is gone"})
            try:
                work.wait()
            except RuntimeError as error:
                raise TransferFailed(f"the broadcast failed: {str(error).splitlines()[0]}") from error

        return wait

    def drop(self, wait: float = 0.0) -> None:
        """Leave the group. What is under way there ends by its own deadline, and another thread waits for that.

        Args:
            wait: seconds to wait for that thread: at exit, none should be inside torch.
        """
        holder = [self._group]
        self._group = None
        if holder[0] is not None:
            thread = threading.Thread(target=_destroy, args=(holder,), name="drop-weight-group", daemon=True)
            thread.start()
            thread.join(wait)


def _destroy(holder: list[dist.ProcessGroupGloo]) -> None:
    """Release the last reference, which is in `holder` alone: whoever does that waits for operations under way."""
    with contextlib.suppress(RuntimeError):  # there is no use in an error of what is thrown away
        holder[0].abort()
    holder.clear()


def form_group(
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
    deadline = time.monotonic() + JOIN_SECONDS
    world_size = 1 + sum(ranks.get(name, 1) for name in members)
    result: list[dist.ProcessGroupGloo | RuntimeError] = []
    formed = threading.Event()

    def join_as_root() -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.host)]
        try:
            result.append(dist.ProcessGroupGloo(store.epoch(epoch, secret), 0, world_size, options))
        except RuntimeError as error:
            result.append(error)
        if abandoned.is_set():
            result.clear()
        formed.set()

    abandoned = threading.Event()
    threading.Thread(target=join_as_root, name=f"weight-group-{epoch}", daemon=True).start()
    calls, rank = {}, 1
    for name in members:
        request = rollout_pb2.JoinWeightGroupRequest(
            run_id=run_id,
            group_epoch=epoch,
            transport=rollout_pb2.WEIGHT_TRANSPORT_GLOO,
            store_host=store.host,
            store_port=store.port,
            rank=rank,
            world_size=world_size,
            timeout=to_duration(timeout),
            secret=secret,
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
    if isinstance(result[0], RuntimeError):
        raise TransferFailed(f"weight group {epoch} did not come about: {str(result[0]).splitlines()[0]}")
    log.info("weight group made", extra={"epoch": epoch, "ranks": world_size})
    return WeightGroup(epoch, members, result.pop())
