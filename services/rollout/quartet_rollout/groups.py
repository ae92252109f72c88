"""The groups in progress: one task each, and the leases that they hold."""

import asyncio
from collections.abc import Callable

from quartet.v1 import broker_pb2

from quartet_common.durations import to_seconds
from quartet_common.log import get_logger
from quartet_rollout.agents.served import ServedEnvironments
from quartet_rollout.broker import Leases, UploadBatcher
from quartet_rollout.callbacks import Callbacks
from quartet_rollout.concurrency import Concurrency
from quartet_rollout.engines.base import EngineError
from quartet_rollout.environments import Environments
from quartet_rollout.group import Group, Stage, pinned_version
from quartet_rollout.metrics import GROUPS, LEASES
from quartet_rollout.scoring import GroupScorer
from quartet_rollout.state import RolloutState
from quartet_rollout.teachers import Teachers

log = get_logger(__name__)

_DEFAULT_TTL_SECONDS = 60.0
"""The contract's default."""


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
