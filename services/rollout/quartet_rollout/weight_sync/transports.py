"""The rollout's end of weight transports: a process group, files, or another package's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from quartet.v1.rollout_pb2 import WeightManifest, WeightTensor
from safetensors import SafetensorError, safe_open

from quartet_common.config import ConfigError
from quartet_common.ports import address_toward
from quartet_common.weights import bucket_file
from quartet_rollout.errors import EngineError, WeightTransferError
from quartet_rollout.weight_sync.spec import WeightGroupInfo
from quartet_server.transports import OWN_TRANSPORTS, load_transports, transport_names
from quartet_weights.buckets import torch_dtype, view
from quartet_weights.process_group import (
    GroupError,
    ProcessGroup,
    epoch_store,
    first_line,
    nccl_missing,
)

Buckets = Sequence[torch.Tensor]
# Concurrent broadcasts: one bucket is checksummed, the backend's thread receives the next, a third is queued.
_AHEAD = 3


class Transport(Protocol):
    """This rollout's end of one group epoch, created when all ranks have met. Its calls block, possibly forever: run
    them on a daemon thread."""

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
    """Join the group of an epoch. Raises WeightTransferError at its deadline; EngineError for an unknown transport, and
    if that of a package returns no `Transport`."""
    if info.transport not in transports():
        raise EngineError(
            f"weight transport '{info.transport}' is not available here; allowed: {', '.join(transports())}"
        )
    if info.transport == "file":
        return FileTransport()
    if info.transport in OWN_TRANSPORTS:
        return GroupTransport(info)
    try:
        plugin = load_transports()[info.transport]
    except ConfigError as error:
        raise EngineError(str(error)) from error
    with failing(info.transport):
        end: Transport = plugin.rollout_end(info)
    if lacking := [part for part in ("device", "receive", "close") if not hasattr(end, part)]:
        gave = type(end).__name__
        raise EngineError(f"transport '{info.transport}': rollout_end gave a {gave}, which lacks {', '.join(lacking)}")
    return end


@contextmanager
def failing(transport: str) -> Iterator[None]:
    """Raise any error of a transport's code as WeightTransferError, after which the old weights stay in use."""
    try:
        yield
    except WeightTransferError:
        raise
    except Exception as error:  # a package's code may raise anything
        raise WeightTransferError(f"transport '{transport}' failed: {type(error).__name__}: {error}") from error


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
