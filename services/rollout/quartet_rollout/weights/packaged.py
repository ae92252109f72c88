"""The rollout's end of a transport that another package brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from quartet.v1 import rollout_pb2

from quartet_common.config import ConfigError
from quartet_common.transports import load_transports
from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weights.transport import Transport

_PARTS = ("device", "fill", "close")


class Packaged:
    """A package's `Transport`, as a `Transport`: whatever its code raises is a transfer that failed, and no more. The
    old weights stand then, and the rollout goes on."""

    def __init__(self, info: WeightGroupInfo) -> None:
        """Join. Raises WeightTransferError when it cannot, EngineError when what the package gives is no transport."""
        self._name = info.transport
        try:
            plugin = load_transports()[info.transport]
        except ConfigError as error:
            raise EngineError(str(error)) from error
        try:
            self._end: Transport = plugin.rollout_end(info)
        except Exception as error:  # a package's code: anything may come
            raise self._failed(error) from error
        lacking = [part for part in _PARTS if not hasattr(self._end, part)]
        if lacking:
            gave = type(self._end).__name__
            raise EngineError(f"transport '{self._name}': rollout_end gave a {gave}, which lacks {', '.join(lacking)}")
        self.device: torch.device = self._end.device

    def fill(
        self,
        manifest: rollout_pb2.WeightManifest,
        buckets: Sequence[torch.Tensor],
        path: str,
        timeout_seconds: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        """See `Transport.fill`."""
        try:
            self._end.fill(manifest, buckets, path, timeout_seconds, arrived)
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """See `Transport.close`."""
        self._end.close()

    def _failed(self, error: Exception) -> WeightTransferError:
        if isinstance(error, WeightTransferError):
            return error
        return WeightTransferError(f"transport '{self._name}' failed: {type(error).__name__}: {error}")
