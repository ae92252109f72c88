"""The store of a weight group's epoch, behind the trainer's gate, as torch's process groups want it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from quartet_common.store_gate import StoreClient
from quartet_rollout.engines.base import WeightGroupInfo


class GatedStore(Store):
    """What the ranks of a weight group need of a store, over one connection that ends with it. Keep a reference for as
    long as torch may use it: its C++ side knows this object alone, not these methods."""

    def __init__(self, info: WeightGroupInfo) -> None:
        """Connect within `info.timeout_seconds`. Raises GateError, a RuntimeError, as every method does."""
        super().__init__()
        self._client = StoreClient(info.store_host, info.store_port, info.epoch, info.secret, info.timeout_seconds)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._client.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return a key's value as soon as it is there."""
        return self._client.get([key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._client.get(keys, None if timeout is None else timeout.total_seconds())
