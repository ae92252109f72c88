"""What a transport is on the rollout's side, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quartet_rollout.engines.base import EngineError, WeightGroupInfo

if TYPE_CHECKING:
    import torch
    from quartet.v1 import rollout_pb2


class Transport(Protocol):
    """This rollout's end of one group epoch, made when all ranks have met. Its calls block: run them on a thread that
    may be lost."""

    device: torch.device
    """Where the buckets are."""

    def fill(
        self,
        manifest: rollout_pb2.WeightManifest,
        buckets: Sequence[torch.Tensor],
        path: str,
        timeout_seconds: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        """Fill the manifest's buckets (uint8, one dimension), calling `arrived` with each, in order.

        Raises:
            WeightTransferError: the sender is gone, the time is over, or what came is not what was announced.
        """

    def close(self) -> None:
        """Leave the group, giving up what is under way if that can be done."""


def join(info: WeightGroupInfo) -> Transport:
    """Join the group of an epoch. Raises WeightTransferError at its deadline, EngineError for an unknown transport."""
    if info.transport not in transports():
        raise EngineError(
            f"weight transport '{info.transport}' is not available here; allowed: {', '.join(transports())}"
        )
    if info.transport in ("gloo", "nccl"):
        from quartet_rollout.weights.process_group import GroupTransport

        return GroupTransport(info)
    if info.transport == "file":
        from quartet_rollout.weights.files import Files

        return Files(info)
    from quartet_rollout.weights.packaged import Packaged

    return Packaged(info)


def transports() -> list[str]:
    """The transports that this process can receive by."""
    from quartet_common.transports import plugin_names
    from quartet_weights.process_group import nccl_missing

    return ["gloo", "file", *(["nccl"] if not nccl_missing() else []), *plugin_names()]
