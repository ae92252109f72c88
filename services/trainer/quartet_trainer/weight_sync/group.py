"""Forms a weight group. It is never repaired: when a member fails, one with a higher epoch is formed."""

import socket
import time
from concurrent.futures import wait
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from quartet.v1 import rollout_pb2

from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_common.ports import AddressUnavailable
from quartet_trainer.weight_sync.rollouts import POLL_SECONDS, TransferFailed, WeightGroup, gather
from quartet_trainer.weight_sync.transports import Transport
from quartet_weights.process_group import ProcessGroup, epoch_store, first_line, start_thread

log = get_logger(__name__)

# Forming a group takes about a second.
JOIN_SECONDS = 20.0
_TIMEOUT = timedelta(seconds=JOIN_SECONDS)

_CODES = {
    "gloo": rollout_pb2.WEIGHT_TRANSPORT_GLOO,
    "nccl": rollout_pb2.WEIGHT_TRANSPORT_NCCL,
    "file": rollout_pb2.WEIGHT_TRANSPORT_FILE,
}


class WeightStore:
    """A TCPStore for all epochs, at one address. Each epoch's keys begin with its secret, which only members have."""

    def __init__(self, host: str, port: int = 0):
        """Listen at host:port; port 0 takes a free one. Raises AddressUnavailable if it cannot."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise AddressUnavailable(
                f"trainer.weights.store_host: cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # By default TCPStore listens on all interfaces; with `master_listen_fd` only on that socket, which it owns.
        self._server: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.detach(),
        )

    def epoch(self, epoch: int, secret: bytes) -> dist.Store:
        """Return rank 0's end of an epoch's store. Raises RuntimeError after `close`."""
        # A connection for each epoch, because a blocking wait blocks the connection.
        return epoch_store(dist.TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT), epoch, secret)

    def close(self) -> None:
        """Stop listening."""
        self._server = None  # TCPStore closes its sockets when the last reference is gone.


def form_group(name: str, transport: Transport, store: WeightStore, interface: str, group: WeightGroup) -> None:
    """Invite the rollouts of `group`; with gloo or nccl, rank 0 joins its process group meanwhile.

    Args:
        name: of the transport.
        interface: see `ProcessGroup`.

    Raises:
        TransferFailed: a rollout did not join, or has another number of ranks than assumed, which is corrected.
    """
    request = rollout_pb2.JoinWeightGroupRequest(
        run_id=group.run_id,
        group_epoch=group.epoch,
        transport=_CODES.get(name, rollout_pb2.WEIGHT_TRANSPORT_CUSTOM),
        store_host=store.host,
        store_port=store.port,
        world_size=group.world_size,
        timeout=to_duration(group.seconds),
        libraries=transport.libraries,
        secret=group.secret,
        transport_name="" if name in _CODES else name,
        invitation=transport.invitation,
    )
    deadline = time.monotonic() + JOIN_SECONDS
    if name in ("gloo", "nccl"):
        meeting = start_thread(f"weight-group-{group.epoch}", partial(_join, name, store, interface, group))
    calls, request.rank = {}, 1
    for rollout, known in group.rollouts.items():  # each call serializes the request as it is then
        calls[rollout] = known.stub.JoinWeightGroup.future(request, timeout=JOIN_SECONDS)
        request.rank += known.ranks
    if errors := gather(calls, deadline, group.alive):
        raise TransferFailed(f"joining weight group {group.epoch} failed", errors)
    ranks = {rollout: max(1, call.result().ranks) for rollout, call in calls.items()}
    wrong = {rollout: count for rollout, count in ranks.items() if count != group.rollouts[rollout].ranks}
    for rollout, count in wrong.items():
        group.rollouts[rollout].ranks = count
    if wrong:
        raise TransferFailed(f"weight group {group.epoch}: rollouts have another number of ranks than assumed: {wrong}")
    if name in ("gloo", "nccl"):
        failed = f"weight group {group.epoch} failed to form"
        while not wait([meeting], POLL_SECONDS).done:
            gone = [rollout for rollout in group.rollouts if not group.alive(rollout)]
            if gone or time.monotonic() > deadline:
                raise TransferFailed(failed, dict.fromkeys(gone, "is gone"))
        if (error := meeting.exception()) is not None:
            raise TransferFailed(f"{failed}: {first_line(error, group.secret)}")
        group.process_group = meeting.result()
    log.info("weight group made", extra={"epoch": group.epoch, "ranks": group.world_size, "transport": name})


def _join(name: str, store: WeightStore, interface: str, group: WeightGroup) -> ProcessGroup:
    own = store.epoch(group.epoch, group.secret)
    return ProcessGroup(name, own, 0, group.world_size, group.seconds, store.host, interface)
