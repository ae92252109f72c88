"""Leases prompts while the engine has room for more completions.

A LeasePrompts request waits at the broker until there are prompts. It carries the current policy version, and prompts
pinned to a newer one are not leased to it. So a second request is sent after a weight update. The first is not
cancelled, because leases granted to a cancelled request are lost until they expire.
"""

import asyncio
import time

import grpc
from quartet.v1 import broker_pb2

from quartet_common.durations import to_duration
from quartet_common.errors import describe, retry_delay
from quartet_common.log import get_logger
from quartet_rollout.broker import TRANSIENT, BrokerLink
from quartet_rollout.config import RolloutSection
from quartet_rollout.direct import DirectAdmission
from quartet_rollout.groups import Groups
from quartet_rollout.membership import Membership
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

_MAX_PROMPTS = 1024

_PORTIONS = 8
"""A request is for at least one part in this many of the window."""

# Interval at which the engine's load is checked.
_LOAD_POLL_SECONDS = 0.2

# Least duration of a request that returns no prompts, even if the broker does not wait.
_IDLE_SECONDS = 0.05


class PromptLoop:
    """Leases prompts and starts their groups."""

    def __init__(
        self,
        state: RolloutState,
        link: BrokerLink,
        groups: Groups,
        membership: Membership,
        admission: DirectAdmission,
        section: RolloutSection,
    ):
        """`admission`: of direct requests, for which it reserves a part of the window."""
        self._state, self._link, self._groups, self._membership = state, link, groups, membership
        self._admission, self._section = admission, section
        self._requests: dict[asyncio.Task, tuple[int, int]] = {}
        """Pending requests: (policy version, completions of the requested prompts)."""

    async def run(self) -> None:
        """Lease until cancelled."""
        while True:
            if prompts := self._prompts_wanted():
                self._request(prompts)
            await self._state.changes.wait(_LOAD_POLL_SECONDS)

    async def stop(self, timeout: float) -> None:
        """Wait for pending requests, at most `timeout` seconds, because their leases must be released."""
        if self._requests:
            await asyncio.wait(tuple(self._requests), timeout=timeout)

    @property
    def _group_size(self) -> int:
        return (self._state.spec.group_size if self._state.spec is not None else 0) or 1

    def _prompts_wanted(self) -> int:
        """Return how many prompts to request now; 0: none.

        A request is for at least an eighth of the window, to avoid one call per finished group.
        """
        state, section, group_size = self._state, self._section, self._group_size
        if state.engine is None:
            return 0
        stats, generating = state.engine.stats(), self._groups.generating
        if not state.paused:  # the load of a paused engine is no evidence
            self._groups.concurrency.observe(stats, generating, group_size)
            if stats.waiting > section.max_waiting_completions:
                return 0
        if not state.may_lease or stats.kv_cache_use > section.kv_cache_limit:
            return 0
        version = state.policy_version
        if any(requested_version == version for requested_version, _ in self._requests.values()):
            return 0
        window = self._groups.concurrency.window
        free, unsettled = window - generating - self._admission.reserved, self._groups.unsettled
        if not generating:
            free = max(free, group_size)  # a group larger than the window is generated alone
        most = section.max_unsettled_completions if unsettled else max(section.max_unsettled_completions, group_size)
        room = min(free, most - unsettled)
        portion = max(group_size, window // _PORTIONS)
        if room < (portion if generating else group_size):
            return 0
        # Pending requests of older versions may still return prompts: leave room for them, but request one portion.
        expected = sum(completions for _, completions in self._requests.values())
        if expected:
            room = max(room - expected, min(room, portion))
        return min(room // group_size, _MAX_PROMPTS)

    def _request(self, prompts: int) -> None:
        version = self._state.policy_version
        task = asyncio.create_task(self._lease(prompts, version), name="lease prompts")
        self._requests[task] = (version, prompts * self._group_size)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task) -> None:
        del self._requests[task]
        self._state.changes.notify()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("leasing prompts failed: %s", error, exc_info=error)

    async def _lease(self, prompts: int, version: int) -> None:
        wait = self._section.lease_wait_seconds
        began = time.monotonic()
        request = broker_pb2.LeasePromptsRequest(
            run_id=self._state.run_id,
            holder=self._state.instance_id,
            max_prompts=prompts,
            wait=to_duration(wait),
            policy_version=version,
        )
        try:
            response = await self._link.call(
                self._link.stub.LeasePrompts, request, timeout=wait + self._section.rpc_timeout_seconds
            )
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
                log.info("no prompts are granted: %s", describe(error), extra={"run": self._state.run_id})
                self._membership.request_heartbeat()
            elif error.code() not in TRANSIENT:
                log.error("leasing prompts failed: %s", describe(error), extra={"run": self._state.run_id})
            await asyncio.sleep(max(0.5, retry_delay(error) or 0.0))
            return
        if self._state.run_id != request.run_id:  # the rollout has switched to another run
            releases = [broker_pb2.LeaseRelease(lease_id=lease.lease_id) for lease in response.leases]
            await self._groups.give_back_unstarted(releases, request.run_id)
            return
        if response.leases:
            await self._groups.start(list(response.leases))
        elif time.monotonic() - began < _IDLE_SECONDS:
            await asyncio.sleep(_IDLE_SECONDS)
