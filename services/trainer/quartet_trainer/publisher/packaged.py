"""The trainer's end of a transport that another package brings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quartet.v1 import rollout_pb2

from quartet_common.config import ConfigError
from quartet_common.transports import load_transports, read_parameters
from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.transport import Carriage, Channel

if TYPE_CHECKING:
    import torch

_PARTS = ("device", "libraries", "invite", "meet", "close")


class TrainerEnd(Protocol):
    """What a package's `trainer_end` gives: a `Transport` without name and code, that invites."""

    device: torch.device
    """Where its buckets are."""
    libraries: dict[str, str]
    """Versions that must be the same at the rollouts."""

    def invite(self, epoch: int) -> dict[str, str]:
        """Be ready to meet the members of an epoch, and return what each is told to find this end, e.g. host and port.
        An earlier epoch that has not met has been given up: its `meet` may wait no longer."""

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Channel:
        """See `Transport.meet`. The rollouts have the same secret: have them show it."""

    def close(self) -> None:
        """Listen no more: the publisher ends."""


class Packaged:
    """A package's end as a `Transport`. What goes wrong in its sockets and files is a transfer that failed."""

    code = rollout_pb2.WEIGHT_TRANSPORT_CUSTOM

    def __init__(self, name: str, parameters: dict[str, Any], host: str, folder: Path):
        """Make it. Raises ConfigError, as `load_transports` does, and when it cannot work here."""
        self.name = name
        plugin = load_transports()[name]
        checked = read_parameters(plugin, parameters)
        try:
            self._end: TrainerEnd = plugin.trainer_end(checked, host, folder)
        except Exception as error:  # a package's code: anything may come
            raise ConfigError(f"trainer.weights.transport: {name} is not possible here: {error}") from error
        lacking = [part for part in _PARTS if not hasattr(self._end, part)]
        if lacking:
            raise ConfigError(
                f"transport '{name}': trainer_end gave a {type(self._end).__name__}, which lacks {', '.join(lacking)}"
            )
        self.device, self.libraries = self._end.device, self._end.libraries

    def invite(self, epoch: int) -> dict[str, str]:
        """See `TrainerEnd.invite`. Raises TransferFailed."""
        try:
            return self._end.invite(epoch)
        except Exception as error:
            raise TransferFailed(f"transport '{self.name}' failed: {type(error).__name__}: {error}") from error

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> PackagedChannel:
        """See `Transport.meet`."""
        try:
            return PackagedChannel(self.name, self._end.meet(epoch, secret, world_size, timeout))
        except RuntimeError:
            raise
        except Exception as error:
            raise RuntimeError(f"transport '{self.name}' failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Listen no more."""
        self._end.close()


class PackagedChannel:
    """A package's channel."""

    def __init__(self, name: str, channel: Channel):
        self._name, self._channel = name, channel

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`. What the learner raises while it packs is the learner's, and goes on."""
        try:
            return self._channel.carry(carriage)
        except OSError as error:
            raise TransferFailed(f"transport '{self._name}' failed: {type(error).__name__}: {error}") from error

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`."""
        self._channel.drop(wait)
