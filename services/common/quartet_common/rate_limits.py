"""How many calls a second a peer may make: token buckets, one a peer and class of calls.

A peer is the subject of its certificate, or else the host it calls from. A bucket holds as many calls as its rate makes
in `burst_seconds`, and at least one; each call takes one out, and they come back at the rate. A stream is one call.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import grpc

from quartet_common import metrics
from quartet_common.config import ServerSection
from quartet_common.errors import ContractError, resource_exhausted
from quartet_common.identity import name_in

_LIMITED = metrics.counter(
    "quartet_grpc_rate_limited_total",
    "Calls refused: their peer makes too many, by class (calls, work)",
    ["class"],
)

_WORK = frozenset({"SubmitPrompts", "Score", "ScoreStream", "Execute", "Generate", "GenerateStream"})
# Probes must not be starved by who they watch over, nor fail because a peer on the same host is busy.
_FREE = "/grpc.health.v1.Health/"
# Buckets kept; of more peers the one that was silent the longest begins anew, with a full one.
_MOST_PEERS = 10_000


class Bucket:
    """Calls that may be made now, by a clock that the caller reads."""

    def __init__(self, rate: float, size: float, now: float):
        """`rate`: calls a second, > 0. `size`: most calls at once, >= 1."""
        self._rate, self._size = rate, size
        self._level, self._at = size, now

    def take(self, now: float) -> float:
        """Take a call out. Return 0; or, if there is none, after how many seconds there will be."""
        self._level = min(self._size, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._level >= 1:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self._rate


class RateLimits:
    """The limits of one server."""

    def __init__(self, settings: ServerSection, clock: Callable[[], float] = time.monotonic):
        rates = {"calls": settings.calls_per_second, "work": settings.work_calls_per_second}
        self._rates = {name: rate for name, rate in rates.items() if rate}
        self._burst_seconds = settings.burst_seconds
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._rates)

    def refusal(self, method: str, peer: str) -> ContractError | None:
        """Count a call ("/quartet.v1.BrokerService/SubmitPrompts"); return RESOURCE_EXHAUSTED if it is one too many."""
        if method.startswith(_FREE):
            return None
        for name, rate in self._rates.items():
            if name == "work" and method.rpartition("/")[2] not in _WORK:
                continue
            wait = self._bucket(name, rate, peer).take(self._clock())
            if wait:
                _LIMITED.labels(name).inc()
                key = "server.calls_per_second" if name == "calls" else "server.work_calls_per_second"
                return resource_exhausted(
                    f"rate of {peer}", f"more than {rate:g} calls a second ({key}); retry in {wait:.2g} s", wait
                )
        return None

    def _bucket(self, name: str, rate: float, peer: str) -> Bucket:
        bucket = self._buckets.pop((name, peer), None)
        if bucket is None:
            bucket = Bucket(rate, max(1.0, rate * self._burst_seconds), self._clock())
        self._buckets[name, peer] = bucket
        if len(self._buckets) > _MOST_PEERS * len(self._rates):
            self._buckets.popitem(last=False)
        return bucket


def peer_of(context: grpc.aio.ServicerContext) -> str:
    """Return who calls: "certificate NAME", or "host ADDRESS"."""
    if name := name_in(context.auth_context()):
        return f"certificate {name}"
    # "ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711", "unix:..."
    address = context.peer()
    return f"host {address.rpartition(':')[0]}" if address.startswith("ip") else f"host {address}"
