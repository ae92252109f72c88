"""Keeps the groups put last in this process, so that a batch made of them is sent without reading them from Redis."""

import time
from dataclasses import dataclass

from quartet_server.wire import Bytes

_MOST_BYTES = 64 << 20
_MOST_SECONDS = 60.0  # groups that were dropped, or leased at another broker, leave after this time

Group = tuple[Bytes, Bytes | None]
"""Payload and transcript."""


@dataclass(slots=True)
class _Put:
    """The groups of a call: slices of its request, which stays in memory until the last of them is taken."""

    at: float
    request_bytes: int
    groups: dict[bytes, Group]


class RecentGroups:
    """Groups by the name under which Redis stores them. A name is never used for other bytes, so none is outdated."""

    def __init__(self) -> None:
        self._puts: dict[bytes, _Put] = {}
        self._bytes = 0

    def keep(self, nonce: str, groups: dict[bytes, Group]) -> None:
        """Keep all groups of a call, named "NONCE-N", if there is room: earlier ones are leased first."""
        now = time.monotonic()
        while self._puts and now - (oldest := next(iter(self._puts.items())))[1].at > _MOST_SECONDS:
            self._forget(*oldest)
        size = sum(len(payload) + len(transcript or b"") for payload, transcript in groups.values())
        if groups and self._bytes + size <= _MOST_BYTES:
            self._puts[nonce.encode()] = _Put(now, size, groups)
            self._bytes += size

    def take(self, name: bytes) -> Group | None:
        """Return a group and forget it; None if it is not here."""
        nonce = name.partition(b"-")[0]
        put = self._puts.get(nonce)
        if put is None:
            return None
        group = put.groups.pop(name, None)
        if not put.groups:
            self._forget(nonce, put)
        return group

    def _forget(self, nonce: bytes, put: _Put) -> None:
        del self._puts[nonce]
        self._bytes -= put.request_bytes
