"""What is sent, and how: tensors are packed into buckets, and a transport sends those: Gloo, NCCL, files (`files`), or
that of a package.

A group's rollouts are invited by `form_group`. It is never repaired: when a member fails, one with a higher epoch is
formed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from quartet.v1 import rollout_pb2

from quartet_common.config import ConfigError
from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_common.ports import AddressUnavailable
from quartet_server.plugins import read_parameters
from quartet_server.transports import OWN_TRANSPORTS, load_transports
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.files import Files
from quartet_trainer.weight_sync.rollouts import POLL_SECONDS, TransferFailed, WeightGroup, gather
from quartet_weights.buckets import BackgroundChecksum, torch_dtype
from quartet_weights.process_group import (
    GroupError,
    ProcessGroup,
    device_of,
    epoch_store,
    first_line,
    nccl_version,
    start_thread,
)

log = get_logger(__name__)

BUFFERS = 4
"""One is filled while the others are sent and checksummed."""
# Forming a group takes about a second.
JOIN_SECONDS = 20.0
_PARTS = ("device", "libraries", "invitation", "send", "close")

Weights = Callable[[], Generator[tuple[str, torch.Tensor], None, None]]
"""Returns the tensors of a manifest by name, in its order; the packer exhausts or closes the generator."""


class Packer:
    """Fills the buckets of a manifest and computes their checksums on a thread.

    Buffers are allocated once, because allocating fresh pages costs more than the copy.
    """

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None, copy: bool = False):
        """Allocate nothing yet; `pack` does.

        Args:
            device: of the buckets; default: the CPU.
            copy: keep all buckets in memory, instead of `BUFFERS` of them.
        """
        self.manifest = manifest
        self._device = device or torch.device("cpu")
        self._pinned = not copy and self._device.type == "cpu" and torch.cuda.is_available()
        self._count = len(manifest.bucket_bytes) if copy else min(BUFFERS, len(manifest.bucket_bytes))
        self._buffers: list[torch.Tensor] = []
        self._checksum = BackgroundChecksum()
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None

    def pack(self, weights: Weights) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 [bucket_bytes], in order. Without `copy`, the `BUFFERS`-th after it overwrites it.

        Raises:
            ValueError: the weights are not those of the manifest; the message names the tensor.
        """
        sizes, count = self.manifest.bucket_bytes, self._count
        if not self._buffers:
            self._buffers = [
                torch.zeros(max(sizes[buffer::count]), dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
                for buffer in range(count)  # a large tensor, in a bucket of its own, enlarges one
            ]
        last, self._checksum = self._checksum, BackgroundChecksum(self._stream)
        last.values()  # wait: its thread may still be reading the buffers
        reads: list[Future[int]] = []
        with closing(weights()) as tensors:
            for index, planned in groupby(self.manifest.tensors, key=lambda tensor: tensor.bucket):
                if index >= count:
                    reads[index - count].result()
                bucket = self._buffers[index % count][: sizes[index]]
                _fill(bucket, planned, tensors)
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                reads.append(self._checksum.add(bucket))
                yield bucket

    def beside_training(self) -> torch.cuda.StreamContext:
        """Return a context in which a thread's GPU work goes to a stream that waits for the packed buckets and for no
        other work of the training."""
        return torch.cuda.stream(self._stream)

    def checksums(self) -> list[int]:
        """Wait for the checksums of the last `pack`: each covers all bytes up to the end of its bucket."""
        return self._checksum.values()


def _fill(
    bucket: torch.Tensor, planned: Iterable[rollout_pb2.WeightTensor], weights: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Copy the next tensors, which must be those planned, into their bucket. Padding, which is part of the checksum, is
    zeroed."""
    end = 0
    for expected in planned:
        name, tensor = next(weights, ("", None))
        if tensor is None or name != expected.name:
            raise ValueError(f"weights: got '{name}'; allowed: '{expected.name}', as announced")
        if tensor.dtype != torch_dtype(expected) or list(tensor.shape) != list(expected.shape):
            allowed = f"{torch_dtype(expected)} {list(expected.shape)}, as announced"
            raise ValueError(f"weights: '{name}' is {tensor.dtype} {list(tensor.shape)}; allowed: {allowed}")
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        bucket[end : expected.offset].zero_()
        end = expected.offset + len(data)
        bucket[expected.offset : end].copy_(data)
    bucket[end:].zero_()


class Transport(Protocol):
    """A transport's end at the trainer; a package's `trainer_end` returns one."""

    device: torch.device
    """Where its buckets are."""
    libraries: dict[str, str]
    """Versions of libraries, by name, that must be the same at the rollouts."""
    invitation: dict[str, str]
    """What rollouts need to connect, e.g. host and port: `WeightGroupInfo.invitation` at their end."""

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        """Send each bucket, uint8 on `device`, to all `world_size` - 1 other ranks of `group`.

        A group with another epoch than the last one's has not met yet: connect its ranks, which have its `secret`, and
        drop those of the last one. At most `BUFFERS` buckets are valid at a time: the next overwrites the
        oldest. Call `group.check()` while waiting, which raises at the deadline or if a member is gone. Any error of
        the transport is a failed transfer, after which the next group has another epoch.
        """

    def close(self) -> None:
        """Close all connections: the publisher is closing."""


class Broadcast(Transport):
    """Gloo and NCCL: one broadcast for each bucket; the next is packed while earlier ones are sent and checksummed.

    The ranks of all epochs meet at one TCPStore. Each epoch's keys begin with its secret, which only members have.
    """

    def __init__(self, backend: str, host: str, port: int = 0, interface: str = ""):
        """Open the store at host:port.

        Args:
            backend: "gloo" or "nccl".
            port: 0: any free one.
            interface: see `ProcessGroup`.

        Raises:
            AddressUnavailable: this host cannot listen there.
        """
        self._backend, self.host, self._interface = backend, host, interface
        self.device = device_of(backend)
        self.libraries = {"nccl": nccl_version()} if backend == "nccl" else {}
        self.invitation = {}
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (")[0].lower()
            raise AddressUnavailable(f"trainer.weights.store_host: cannot listen on {host}:{port}: {why}") from error
        self.port: int = listener.getsockname()[1]
        # By default TCPStore listens on all interfaces; with `master_listen_fd` only on that socket, which it owns.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def join(self, group: WeightGroup) -> ProcessGroup:
        """Join `group` as rank 0; blocks until its rollouts, which are invited meanwhile, have joined."""
        store = epoch_store(self.host, self.port, group.epoch, group.secret, JOIN_SECONDS)
        return ProcessGroup(self._backend, store, 0, group.world_size, group.seconds, self.host, self._interface)

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        assert group.process_group is not None
        try:
            for _ in group.process_group.broadcast(buckets, ahead=BUFFERS, check=group.check):
                pass  # the next bucket overwrites the oldest
        except GroupError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error

    def close(self) -> None:
        """Stop listening. The publisher closes the group."""
        self._store = None  # TCPStore closes its sockets when the last reference is gone


def create_transport(settings: WeightsSection, host: str, folder: Path) -> Transport:
    """Return the configured transport.

    Args:
        host: where rollouts reach this trainer.
        folder: for the file transport's versions; it removes old ones there.

    Raises:
        AddressUnavailable: this host cannot listen at `host`.
        ConfigError: a package is not valid, or its transport cannot work here.
    """
    name = settings.transport
    if name == "file":
        return Files(folder)
    if name in OWN_TRANSPORTS:
        return Broadcast(name, host, settings.store_port, settings.interface)
    plugin = load_transports()[name]
    checked = read_parameters(plugin.parameters, settings.transport_parameters, "trainer.weights.transport_parameters")
    try:
        end: Transport = plugin.trainer_end(checked, host, folder)
    except Exception as error:  # a package's code may raise anything
        raise ConfigError(f"trainer.weights.transport: {name} is not possible here: {error}") from error
    if lacking := [part for part in _PARTS if not hasattr(end, part)]:
        gave = type(end).__name__
        raise ConfigError(f"transport '{name}': trainer_end returned a {gave}, which lacks {', '.join(lacking)}")
    return end


def form_group(name: str, transport: Transport, group: WeightGroup) -> None:
    """Invite the rollouts of `group`; with gloo or nccl, rank 0 joins its process group meanwhile.

    Args:
        name: of the transport.

    Raises:
        TransferFailed: a rollout did not join, or has another number of ranks than assumed, which is corrected.
    """
    own = name in OWN_TRANSPORTS
    request = rollout_pb2.JoinWeightGroupRequest(
        run_id=group.run_id,
        group_epoch=group.epoch,
        transport=f"WEIGHT_TRANSPORT_{name.upper() if own else 'CUSTOM'}",
        world_size=group.world_size,
        timeout=to_duration(group.seconds),
        libraries=transport.libraries,
        secret=group.secret,
        transport_name="" if own else name,
        invitation=transport.invitation,
    )
    deadline = time.monotonic() + JOIN_SECONDS
    if isinstance(transport, Broadcast):
        request.store_host, request.store_port = transport.host, transport.port
        joining = start_thread(f"weight-group-{group.epoch}", partial(transport.join, group))
    calls, request.rank = {}, 1
    for rollout, known in group.rollouts.items():  # each call serializes the request as it is then
        calls[rollout] = known.stub.JoinWeightGroup.future(request, timeout=JOIN_SECONDS)
        request.rank += known.ranks
    if errors := gather(calls, deadline, group.alive):
        raise TransferFailed(f"joining weight group {group.epoch} failed", errors)
    ranks = {rollout: max(1, call.result().ranks) for rollout, call in calls.items()}
    if wrong := {rollout: count for rollout, count in ranks.items() if count != group.rollouts[rollout].ranks}:
        for rollout, count in wrong.items():
            group.rollouts[rollout].ranks = count
        came = f"rollouts have another number of ranks than assumed: {wrong}"
        raise TransferFailed(f"weight group {group.epoch}: {came}")
    if isinstance(transport, Broadcast):
        group.process_group = _joined(joining, group, deadline)
    log.info("weight group made", extra={"epoch": group.epoch, "ranks": group.world_size, "transport": name})


def _joined(joining: Future[ProcessGroup], group: WeightGroup, deadline: float) -> ProcessGroup:
    """Wait for rank 0. Raises TransferFailed, at `deadline` (time.monotonic) at the latest."""
    failed = f"weight group {group.epoch} failed to form"
    while not wait([joining], POLL_SECONDS).done:
        gone = [rollout for rollout in group.rollouts if not group.alive(rollout)]
        if gone or time.monotonic() > deadline:
            raise TransferFailed(failed, dict.fromkeys(gone, "is gone"))
    if (error := joining.exception()) is not None:
        raise TransferFailed(f"{failed}: {first_line(error, group.secret)}")
    return joining.result()
