"""What a transport is on the trainer's side, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quartet_trainer.config import WeightsSection, check_transport

if TYPE_CHECKING:
    import torch
    from quartet.v1 import rollout_pb2

    from quartet_trainer.publisher.store import WeightStore


class Carriage(Protocol):
    """One update on its way: the version, where its buckets come from, and whom to tell."""

    version: int

    @property
    def manifest(self) -> rollout_pb2.WeightManifest:
        """What is in the buckets."""

    @property
    def checksum(self) -> Callable[[], int] | None:
        """The buckets' checksum, where they stand packed already and need not be read for it; may block a little."""

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 on the transport's device; at most `packing.BUFFERS` of them stand at a time."""

    def begin(self, path: str = "") -> None:
        """Have every member pause and receive; `path` is where files are. Raises TransferFailed."""

    def check(self) -> None:
        """Raise TransferFailed when the time is over or a member is gone. Quick; to be called while waiting."""


class Channel(Protocol):
    """Rank 0's end of one group epoch, made when all ranks have met."""

    def carry(self, carriage: Carriage) -> int:
        """Get all buckets to all members, and return their checksum. Raises TransferFailed."""

    def drop(self, wait: float = 0.0) -> None:
        """Leave. What is under way ends by its own deadline on a thread; wait so many seconds for that thread."""


class Transport(Protocol):
    """A way for weights to travel."""

    name: str
    """As `trainer.weights.transport`; the capability that a rollout needs is weights.NAME."""
    code: int
    """A rollout_pb2.WeightTransport."""
    libraries: dict[str, str]
    """Versions that must be the same at the rollouts."""
    device: torch.device
    """Where its buckets are."""

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Channel:
        """Meet the members of an epoch as rank 0: blocks until all are here; run it on a thread that may be lost.

        Args:
            timeout: deadline of each operation in the group, in seconds.

        Raises:
            RuntimeError: they did not meet.
        """


def create_transport(settings: WeightsSection, store: WeightStore, folder: Path) -> Transport:
    """Return the configured transport. `folder` is where files go, and this run's alone: old ones are removed there.

    Raises:
        ConfigError: it cannot work here.
    """
    check_transport(settings)
    if settings.transport in ("gloo", "nccl"):
        from quartet_trainer.publisher.process_group import GroupTransport

        return GroupTransport(settings.transport, store, settings.interface)
    if settings.transport == "file":
        from quartet_trainer.publisher.files import Files

        return Files(folder)
    from quartet_trainer.publisher.packaged import Packaged

    return Packaged(settings.transport, settings.transport_parameters, store.host, folder)


Wait = Callable[[Callable[[], None]], None]
"""Waits for one bucket to have been sent, calling the check it is given all the while."""
