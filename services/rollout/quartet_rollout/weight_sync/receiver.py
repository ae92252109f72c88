"""A member of the weight group, and its end of the transports: a process group, files, or another package's.

It runs in the process that installs the weights: each worker process of an engine, or the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from quartet.v1 import rollout_pb2
from quartet.v1.rollout_pb2 import WeightManifest, WeightTensor
from safetensors import SafetensorError, safe_open

from quartet_common.ports import address_toward
from quartet_common.weights import bucket_file
from quartet_rollout.errors import EngineError, WeightTransferError, pack_error
from quartet_rollout.weight_sync import WeightGroupInfo
from quartet_rollout.weight_sync.adapters import Base
from quartet_server.transports import OWN_TRANSPORTS, load_transports, transport_names
from quartet_weights.buckets import BackgroundChecksum, torch_dtype, view, views
from quartet_weights.process_group import (
    GroupError,
    ProcessGroup,
    epoch_store,
    first_line,
    nccl_missing,
    start_thread,
)

Buckets = Sequence[torch.Tensor]
Received = tuple[WeightManifest, list[torch.Tensor], list[int]]
"""An update, its buckets, and the running checksum at the end of each."""
# Concurrent broadcasts: one bucket is checksummed, the backend's thread receives the next, a third is queued.
_AHEAD = 3


class WeightReceiver:
    """Holds at most one group and one received update. Call it from one thread.

    Joining and receiving run on a thread, since a collective blocks and cannot be interrupted; `poll` returns the end.
    A call that is abandoned (deadline, `leave`) may stay blocked there: nothing else then uses its group and buffers,
    and its late result is discarded. After an error the caller leaves the group: late buckets would otherwise be taken
    for those of the next update.
    """

    member = 0
    """Its index among the engine's members; may be set."""

    def __init__(self, folder: str) -> None:
        """`folder`: the base model's, for adapters."""
        self._folder = Path(folder)
        self._transport = ""
        self._joining: Future[Transport] | None = None
        self._receiving: Future[Received] | None = None
        self._spare: Buckets = []  # Reused, because page faults of new memory cost more than receiving.

    def begin_join(self, invitation: Mapping[str, Any], names: Sequence[str]) -> None:
        """Leave any group, and begin to join this one.

        Args:
            invitation: the fields of the engine's `WeightGroupInfo`; the member's rank follows from it.
            names: the model's parameters.
        """
        self.leave()
        self._base = Base(self._folder, frozenset(names))
        info = WeightGroupInfo(**invitation)
        self._transport = info.transport
        self._joining = start_thread("join-weights", partial(join, replace(info, rank=info.rank + self.member)))

    def begin_receive(self, manifest: bytes, seconds: float, path: str) -> None:
        """Begin to receive the buckets of a serialized manifest, within `seconds`. `path`: of the file transport."""
        self.discard()
        spare, self._spare = self._spare, []
        update, deadline = WeightManifest.FromString(manifest), time.monotonic() + seconds
        receive = partial(self._receive, self._joining, update, deadline, path, spare)
        self._receiving = start_thread("receive-weights", receive)

    def _receive(
        self, joined: Future[Transport] | None, manifest: WeightManifest, deadline: float, path: str, spare: Buckets
    ) -> Received:
        if joined is None:
            raise EngineError("weights were announced, but this rollout is in no weight group")
        transport = joined.result()
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            self._base.check(manifest.lora)
        buckets = _fit(spare, manifest.bucket_bytes, transport.device)
        checksum = BackgroundChecksum()
        for bucket in transport.receive(manifest, buckets, path, deadline - time.monotonic()):
            checksum.add(bucket)
        return manifest, buckets, checksum.values()

    def poll(self) -> list[Any] | None:
        """Return None while the last call runs, then ["", its checksums or None] or [error name, error text]."""
        call = self._receiving or self._joining
        if call is None:
            return pack_error(WeightTransferError("the weight group was left"))
        if not call.done():
            return None
        error = call.exception()
        if error is None:
            return ["", self._receiving.result()[2] if self._receiving else None]
        if not isinstance(error, EngineError):  # a package's code may raise anything
            error = WeightTransferError(f"transport '{self._transport}' failed: {type(error).__name__}: {error}")
        return pack_error(error)

    def leave(self) -> None:
        """Leave the group, if any, and discard what was received."""
        self.discard()
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(_close)

    def has_received(self) -> bool:
        """Whether there are weights to install."""
        call = self._receiving
        return call is not None and call.done() and call.exception() is None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) for all parameters: those received, or the base model with the received
        adapter. Valid until `discard`, `leave` or `begin_receive`."""
        if self._receiving is None or not self.has_received():
            raise EngineError("no weights were received that could be installed")
        manifest, buckets, _ = self._receiving.result()
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            return self._base.merged(manifest.lora, dict(views(manifest, buckets)))
        return views(manifest, buckets)

    def discard(self) -> None:
        """Discard what was received, and keep its buffers for the next update."""
        if self._receiving is not None and self.has_received():
            self._spare = self._receiving.result()[1]
        self._receiving = None


def _close(joining: Future[Transport]) -> None:
    if joining.exception() is None:
        joining.result().close()


def _fit(spare: Buckets, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return uint8 buffers of these sizes, from `spare` where sizes and device agree."""
    return [
        spare[i]
        if i < len(spare) and spare[i].numel() == size and spare[i].device == device
        else torch.empty(size, dtype=torch.uint8, device=device)
        for i, size in enumerate(sizes)
    ]


class Transport(Protocol):
    """This rollout's end of one group epoch, created when all ranks have met. Its calls block, possibly forever: run
    them on a daemon thread. Whatever they raise is a failed transfer."""

    device: torch.device
    """Device of the buckets."""

    def receive(self, manifest: WeightManifest, buckets: Buckets, path: str, seconds: float) -> Iterator[torch.Tensor]:
        """Fill the manifest's buckets (uint8, one dimension) and yield each, in order, when it has arrived.

        Args:
            path: with the file transport, the folder of the version.

        Raises:
            WeightTransferError: the sender is gone, `seconds` have passed, or the data does not fit the manifest.
        """

    def close(self) -> None:
        """Leave the group; abort a transfer in progress if possible."""


def join(info: WeightGroupInfo) -> Transport:
    """Join the group of an epoch. Raises WeightTransferError at its deadline; for another package's transport whatever
    that raises, and EngineError if it returns no `Transport`."""
    if info.transport == "file":
        return FileTransport()
    if info.transport in OWN_TRANSPORTS:
        return GroupTransport(info)
    end: Transport = load_transports()[info.transport].rollout_end(info)
    if lacking := [part for part in ("device", "receive", "close") if not hasattr(end, part)]:
        gave = type(end).__name__
        raise EngineError(f"transport '{info.transport}': rollout_end gave a {gave}, which lacks {', '.join(lacking)}")
    return end


def transports() -> list[str]:
    """Return the names of the transports that this process can receive by."""
    return [name for name in transport_names() if name != "nccl" or not nccl_missing()]


class GroupTransport:
    """The process group of an epoch, over Gloo or NCCL; buckets are in host memory."""

    device = torch.device("cpu")

    def __init__(self, info: WeightGroupInfo) -> None:
        """Rendezvous with all ranks. Raises WeightTransferError after `info.timeout_seconds`, or at once if the store
        refuses connections."""
        try:
            own = epoch_store(info.store_host, info.store_port, info.epoch, info.secret, info.timeout_seconds)
            here = address_toward(info.store_host, info.store_port)
            self.group = ProcessGroup(
                info.transport, own, info.rank, info.world_size, info.timeout_seconds, here, info.interface
            )
        except (OSError, RuntimeError) as error:  # torch's DistError family
            raise WeightTransferError(
                f"could not join the weight group of epoch {info.epoch} at {info.store_host}:{info.store_port} as rank "
                f"{info.rank} of {info.world_size} within {info.timeout_seconds:g} s: {first_line(error, info.secret)}"
            ) from error
        self._staging: list[torch.Tensor] = []

    def receive(self, manifest: WeightManifest, buckets: Buckets, path: str, seconds: float) -> Iterator[torch.Tensor]:
        landings = (self._landing(index, bucket, max(manifest.bucket_bytes)) for index, bucket in enumerate(buckets))
        arrived = self.group.broadcast(landings, time.monotonic() + seconds, _AHEAD)
        try:
            for bucket, landing in zip(buckets, arrived, strict=True):
                if landing is not bucket:
                    bucket.copy_(landing)
                yield bucket
        except GroupError as error:
            raise WeightTransferError(f"the broadcast of weights failed: {error}") from error

    def _landing(self, index: int, bucket: torch.Tensor, largest: int) -> torch.Tensor:
        """Return the tensor to receive into: the bucket itself, or with NCCL a staging buffer on the GPU."""
        if self.group.device == bucket.device:
            return bucket
        if not self._staging or self._staging[0].numel() < largest:
            self._staging = [torch.empty(largest, dtype=torch.uint8, device=self.group.device) for _ in range(_AHEAD)]
        return self._staging[index % _AHEAD][: bucket.numel()]

    def close(self) -> None:
        self.group.close()


class FileTransport:
    """Safetensors files in a folder that the trainer and this rollout share; docs/weights.md has the layout.

    There is no rendezvous: the trainer finishes the files before it announces the update.
    """

    device = torch.device("cpu")

    def receive(self, manifest: WeightManifest, buckets: Buckets, path: str, seconds: float) -> Iterator[torch.Tensor]:
        if not path:
            raise WeightTransferError("the update was announced without the path of its files")
        deadline = time.monotonic() + seconds
        for index, tensors in groupby(manifest.tensors, key=lambda tensor: tensor.bucket):
            if time.monotonic() > deadline:
                raise WeightTransferError(f"the files in '{path}' were not read within {seconds:g} s")
            _read(Path(path) / bucket_file(manifest, index), buckets[index], tensors)
            yield buckets[index]

    def close(self) -> None:
        """Does nothing."""


def _read(path: Path, bucket: torch.Tensor, tensors: Iterable[WeightTensor]) -> None:
    """Fill a bucket from its file. Raises WeightTransferError."""
    bucket.zero_()  # The checksum includes the padding.
    try:
        with safe_open(path, framework="pt") as file:
            for tensor in tensors:
                came = file.get_tensor(tensor.name)
                if came.dtype != torch_dtype(tensor) or list(came.shape) != list(tensor.shape):
                    raise WeightTransferError(
                        f"'{tensor.name}' in '{path}' is {came.dtype} {list(came.shape)}, not as announced"
                    )
                view(tensor, bucket).copy_(came)
    except (OSError, SafetensorError) as error:
        raise WeightTransferError(f"the weights in '{path}' cannot be read: {error}") from error
