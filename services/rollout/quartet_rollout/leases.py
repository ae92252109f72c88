"""Leases on prompts: renewed every third of their ttl while the work lasts, given back when it fails or ends early."""

import asyncio
from collections.abc import Callable, Iterable

import grpc
from quartet.v1 import broker_pb2

from quartet_common.durations import to_seconds
from quartet_common.errors import describe
from quartet_common.log import get_logger
from quartet_rollout.broker_link import LARGEST_GROUP, TRANSIENT, BrokerLink
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

# Most leases in one call, so that a call stays small.
_CHUNK = 512

# The contract's default, where a run's specification says none.
_DEFAULT_TTL_SECONDS = 60.0


class LeaseKeeper:
    """The leases this rollout holds."""

    def __init__(self, state: RolloutState, link: BrokerLink):
        self._state, self._link = state, link
        self._on_lost: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._on_lost)

    def hold(self, lease_id: str, on_lost: Callable[[], None]) -> None:
        """Renew the lease from now on; call `on_lost` if the broker says it is lost."""
        self._on_lost[lease_id] = on_lost

    def settled(self, lease_id: str) -> None:
        """The lease is no more: its group was put, or it was given back."""
        self._on_lost.pop(lease_id, None)

    async def run(self) -> None:
        """Renew for as long as the service lives."""
        while True:
            if (spec := self._state.spec) is None:
                await self._state.changes.wait()
                continue
            ttl = to_seconds(spec.prompt_lease_ttl) or _DEFAULT_TTL_SECONDS
            await asyncio.sleep(ttl / 3)
            held = list(self._on_lost)
            for begin in range(0, len(held), _CHUNK):
                await self._renew(held[begin : begin + _CHUNK], ttl)

    async def _renew(self, lease_ids: list[str], ttl: float) -> None:
        request = broker_pb2.RenewLeasesRequest(run_id=self._state.run_id, lease_ids=lease_ids)
        try:
            response = await self._link.call("RenewLeases", request, timeout=max(1.0, ttl / 3))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                lost = lease_ids
            else:
                log.warning("could not renew leases: %s", describe(error), extra={"count": len(lease_ids)})
                return
        else:
            lost = response.lost
        for lease_id in lost:
            if (on_lost := self._on_lost.pop(lease_id, None)) is not None:
                on_lost()

    async def unscored(self, lease: broker_pb2.PromptLease) -> bytes:
        """Return the completions that are kept of a leased prompt, a serialized UnscoredGroup. Raises grpc.RpcError."""
        request = broker_pb2.GetUnscoredRequest(run_id=self._state.run_id, instance_id=lease.instance.instance_id)
        return (await self._link.insist("GetUnscored", request)).unscored

    async def set_aside(self, release: broker_pb2.LeaseRelease) -> None:
        """Release a lease with completions that must not be lost: the lease is renewed until the broker has them."""
        if len(release.unscored) > LARGEST_GROUP:
            release.failure += f"; its {len(release.unscored)} bytes of completions are not kept: they fit no message"
            release.ClearField("unscored")
        request = broker_pb2.ReleaseLeasesRequest(run_id=self._state.run_id, releases=[release])
        try:
            await self._link.insist("ReleaseLeases", request)
        except grpc.RpcError as error:
            log.info("a group was not set aside: %s", describe(error), extra={"lease": release.lease_id})
        self.settled(release.lease_id)

    async def give_back(
        self, releases: Iterable[broker_pb2.LeaseRelease], timeout: float = 10.0, run_id: str = ""
    ) -> None:
        """Release leases, trying for `timeout` seconds; what the broker is not told expires.

        `run_id`: the run that they are of, where that is not the one this rollout works for now.
        """
        run_id = run_id or self._state.run_id
        releases = list(releases)
        for release in releases:
            self.settled(release.lease_id)
        for begin in range(0, len(releases), _CHUNK):
            request = broker_pb2.ReleaseLeasesRequest(run_id=run_id, releases=releases[begin : begin + _CHUNK])
            try:
                async with asyncio.timeout(timeout):
                    await self._link.insist("ReleaseLeases", request)
            except TimeoutError:
                log.warning("the broker did not take leases back; they will expire", extra={"count": len(releases)})
                return
            except grpc.RpcError as error:
                assert error.code() not in TRANSIENT
                # A run that has ended or is gone has no use for its leases.
                log.info("leases not given back: %s", describe(error), extra={"count": len(releases)})
