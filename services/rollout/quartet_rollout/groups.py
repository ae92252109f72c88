"""The groups in progress: prompts are leased while the engine has room for more completions, and each gets a task.

A LeasePrompts request waits at the broker until there are prompts. It carries the current policy version, and prompts
pinned to a newer one are not leased to it. So a second request is sent after a weight update. The first is not
cancelled, because leases granted to a cancelled request are lost until they expire.
"""

import asyncio
import time
from collections.abc import Callable

import grpc
from quartet.v1 import broker_pb2

from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import describe, retry_delay
from quartet_common.log import get_logger
from quartet_rollout.agents.served import ServedEnvironments
from quartet_rollout.broker import TRANSIENT, BrokerLink, Leases, UploadBatcher
from quartet_rollout.callbacks import Callbacks
from quartet_rollout.concurrency import Concurrency
from quartet_rollout.config import RolloutSection
from quartet_rollout.direct import DirectAdmission
from quartet_rollout.engines.base import EngineError
from quartet_rollout.environments import Environments
from quartet_rollout.group import Group, Stage, pinned_version
from quartet_rollout.membership import Membership
from quartet_rollout.metrics import GROUPS, LEASES
from quartet_rollout.scoring import GroupScorer
from quartet_rollout.state import RolloutState
from quartet_rollout.teachers import Teachers

log = get_logger(__name__)

_DEFAULT_TTL_SECONDS = 60.0
"""The contract's default of `RunSpec.prompt_lease_ttl`."""
_MAX_PROMPTS = 1024

_PORTIONS = 8
"""A request is for at least one part in this many of the window."""

# Interval at which the engine's load is checked.
_LOAD_POLL_SECONDS = 0.2

# Least duration of a request that returns no prompts, even if the broker does not wait.
_IDLE_SECONDS = 0.05


class Groups:
    """All groups in progress, by lease."""

    def __init__(
        self,
        state: RolloutState,
        leases: Leases,
        scorer: GroupScorer,
        uploads: UploadBatcher,
        environments: Environments,
        concurrency: Concurrency,
        served: ServedEnvironments | None,
        teachers: Teachers,
        callbacks: Callbacks,
        on_engine_failed: Callable[[str], None],
    ):
        """`on_engine_failed` is called with the reason when the engine has failed; it must stop the service."""
        self._state, self._leases, self._scorer, self._uploads = state, leases, scorer, uploads
        self._environments, self._served, self._teachers = environments, served, teachers
        self._callbacks = callbacks
        self._on_engine_failed = on_engine_failed
        self._groups: dict[str, Group] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.concurrency = concurrency

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generating(self) -> int:
        """Completions that are being generated."""
        return sum(group.n - group.generated for group in self._groups.values() if group.stage is Stage.GENERATING)

    @property
    def unsettled(self) -> int:
        """Completions of all groups in progress."""
        return sum(group.n for group in self._held.values())

    async def start(self, leases: list[broker_pb2.PromptLease]) -> None:
        """Start a group for each lease; release those that cannot be generated now."""
        unwanted = []
        for lease in leases:
            pinned = pinned_version(lease.instance) if not lease.unscored else None
            if self._state.may_lease and pinned in (None, self._state.policy_version):
                self._start(lease)
            else:
                unwanted.append(broker_pb2.LeaseRelease(lease_id=lease.lease_id))
        LEASES.set(len(self))
        if unwanted:
            await self.give_back_unstarted(unwanted)

    async def give_back_unstarted(self, releases: list[broker_pb2.LeaseRelease], run_id: str = "") -> None:
        """Release leases, by default of the current run, without counting an attempt."""
        GROUPS.labels("given_back").inc(len(releases))
        await self._leases.release(releases, run_id=run_id)

    def _start(self, lease: broker_pb2.PromptLease) -> None:
        lease_id = lease.lease_id
        parts = self._leases, self._scorer, self._uploads, self._environments, self.concurrency, self._served
        group = self._groups[lease_id] = Group(lease, self._state, *parts, self._teachers, self._callbacks)
        task = asyncio.create_task(self._run(group), name=f"group {lease.instance.instance_id}")
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._gone(lease_id))

    async def _run(self, group: Group) -> None:
        try:
            await group.run()
        except EngineError as error:
            self._on_engine_failed(f"engine: {error}")

    def _gone(self, lease_id: str) -> None:
        self._groups.pop(lease_id, None)
        del self._tasks[lease_id]
        LEASES.set(len(self))
        self._state.changes.notify()

    @property
    def _held(self) -> dict[str, Group]:
        """Groups whose leases are held: not yet uploaded, released or lost."""
        return {name: group for name, group in self._groups.items() if group.stage is not Stage.SETTLED}

    async def renew_leases(self) -> None:
        """Renew the leases of all groups every third of their ttl, until cancelled."""
        while True:
            if (spec := self._state.spec) is None:
                await self._state.changes.wait()
                continue
            ttl = to_seconds(spec.prompt_lease_ttl) or _DEFAULT_TTL_SECONDS
            await asyncio.sleep(ttl / 3)
            for lease_id in await self._leases.renew(list(self._held), timeout=max(1.0, ttl / 3)):
                self._lost(lease_id)

    def _lost(self, lease_id: str) -> None:
        """Cancel a group whose lease the broker no longer accepts, unless it is being uploaded."""
        group = self._held.get(lease_id)
        if group is None or group.stage is Stage.UPLOADING:  # the broker may have accepted it: its answer decides
            return
        del self._groups[lease_id]
        log.info("lease lost", extra={"group": group.lease.instance.instance_id, "lease": lease_id})
        GROUPS.labels("lease_lost").inc()
        self._tasks[lease_id].cancel()

    async def flush(self, timeout: float) -> None:
        """Wait, at most `timeout` seconds, for the upload of finished groups."""
        tasks = [self._tasks[lease_id] for lease_id, group in self._groups.items() if group.stage is Stage.UPLOADING]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def give_back_all(self, reason: str, timeout: float = 10.0) -> None:
        """Cancel all groups and release their leases, without counting an attempt."""
        tasks = dict(self._tasks)
        if not tasks:
            return
        log.info("giving back %d prompts: %s", len(tasks), reason)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        GROUPS.labels("given_back").inc(len(tasks))
        await self._leases.release((broker_pb2.LeaseRelease(lease_id=lease_id) for lease_id in tasks), timeout)


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
