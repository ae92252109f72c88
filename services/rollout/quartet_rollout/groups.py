"""The groups in progress: one task each, and the release of their leases.

How much of the KV cache a completion needs is known only at its end, so the number of completions given to the engine
(the window) follows the use of the cache, like TCP's congestion window. When the cache is full and completions wait in
the engine, the window shrinks to the number that run. When the whole window runs and the cache has room to spare, it
grows by an eighth each time half of it has finished.
"""

import asyncio
from collections.abc import Callable

from quartet.v1 import broker_pb2

from quartet_common import tracing
from quartet_common.durations import to_seconds
from quartet_common.log import get_logger, log_fields
from quartet_common.text import encodable
from quartet_rollout.broker import LARGEST_GROUP, Leases, UploadBatcher
from quartet_rollout.engines.base import EngineError, EngineStats, PromptError
from quartet_rollout.environments import Environments
from quartet_rollout.group import Group, LeaseReleased, Stage, pinned_version, released
from quartet_rollout.metrics import GROUPS, LEASES
from quartet_rollout.scoring import Scorer
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

_LONGEST_FAILURE = 2000
_DEFAULT_TTL_SECONDS = 60.0
"""The contract's default."""
_GROWTH = 8
_SPARE = 0.1
"""The cache has room to spare while its use is this far below the limit."""


class Concurrency:
    """The window: how many completions the engine may be given at once."""

    def __init__(self, most: int, kv_cache_limit: float):
        """The window begins at `most`, and stays there if the engine reports no KV cache."""
        self._most, self._limit = most, kv_cache_limit
        self.window = most
        self._finished = 0
        self._next_growth = 0

    def finished(self, completions: int) -> None:
        """Count completions that have left the engine."""
        self._finished += completions

    def observe(self, stats: EngineStats, generating: int, least: int) -> int:
        """Adjust the window to the engine's load; return it.

        Args:
            generating: completions given to the engine that have not ended.
            least: the smallest window, e.g. a group.
        """
        least = min(least, self._most)
        if stats.kv_cache_use > self._limit and stats.waiting > 0:
            if stats.running < self.window:
                self._set(max(stats.running, least))
        elif (
            self.window < self._most
            and 0 <= stats.kv_cache_use < self._limit - _SPARE
            and stats.waiting == 0
            and generating > self.window - least
            and self._finished >= self._next_growth
        ):
            self._set(min(self._most, self.window + max(least, self.window // _GROWTH)))
        return self.window

    def _set(self, window: int) -> None:
        self.window = window
        self._next_growth = self._finished + window // 2


class Groups:
    """All groups in progress, by lease."""

    def __init__(
        self,
        state: RolloutState,
        leases: Leases,
        scorer: Scorer,
        uploads: UploadBatcher,
        environments: Environments,
        concurrency: Concurrency,
        on_engine_failed: Callable[[str], None],
    ):
        """`on_engine_failed` is called with the reason when the engine has failed; it must stop the service."""
        self._state, self._leases, self._scorer, self._uploads = state, leases, scorer, uploads
        self._environments, self._on_engine_failed = environments, on_engine_failed
        self._groups: dict[str, Group] = {}
        """Groups whose leases are held: not yet uploaded, released or lost."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.concurrency = concurrency

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def generating(self) -> int:
        """Completions that are being generated."""
        return sum(group.n - group.generated for group in self._groups.values() if group.stage is Stage.GENERATING)

    @property
    def unsettled(self) -> int:
        """Completions of all groups in progress."""
        return sum(group.n for group in self._groups.values())

    async def start(self, leases: list[broker_pb2.PromptLease]) -> None:
        """Start a group for each lease; release those that cannot be generated now."""
        unwanted = []
        for lease in leases:
            pinned = pinned_version(lease.instance) if not lease.unscored else None
            if self._state.may_lease and pinned in (None, self._state.policy_version):
                self._start(lease)
            else:
                unwanted.append(broker_pb2.LeaseRelease(lease_id=lease.lease_id))
        LEASES.set(len(self._groups))
        if unwanted:
            await self.give_back_unstarted(unwanted)

    async def give_back_unstarted(self, releases: list[broker_pb2.LeaseRelease], run_id: str = "") -> None:
        """Release leases, by default of the current run, without counting an attempt."""
        GROUPS.labels("given_back").inc(len(releases))
        await self._leases.release(releases, run_id=run_id)

    def _start(self, lease: broker_pb2.PromptLease) -> None:
        lease_id = lease.lease_id
        group = Group(lease, self._state, self._scorer, self._environments, self._generated)
        self._groups[lease_id] = group
        task = asyncio.create_task(self._live(group), name=f"group {lease.instance.instance_id}")
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._gone(lease_id))

    def _generated(self, group: Group) -> None:
        self.concurrency.finished(group.n)
        self._state.changes.notify()  # The prompt loop may lease again, before these completions are scored.

    def _gone(self, lease_id: str) -> None:
        self._groups.pop(lease_id, None)
        del self._tasks[lease_id]
        LEASES.set(len(self._groups))
        self._state.changes.notify()

    async def renew_leases(self) -> None:
        """Renew the leases of all groups every third of their ttl, until cancelled."""
        while True:
            if (spec := self._state.spec) is None:
                await self._state.changes.wait()
                continue
            ttl = to_seconds(spec.prompt_lease_ttl) or _DEFAULT_TTL_SECONDS
            await asyncio.sleep(ttl / 3)
            for lease_id in await self._leases.renew(list(self._groups), timeout=max(1.0, ttl / 3)):
                self._lost(lease_id)

    def _lost(self, lease_id: str) -> None:
        """Cancel a group whose lease the broker no longer accepts, unless it is being uploaded."""
        group = self._groups.get(lease_id)
        if group is None or group.stage is Stage.UPLOADING:  # the broker may have accepted it: its answer decides
            return
        del self._groups[lease_id]
        log.info("lease lost", extra={"group": group.lease.instance.instance_id, "lease": lease_id})
        GROUPS.labels("lease_lost").inc()
        self._tasks[lease_id].cancel()

    async def _live(self, group: Group) -> None:
        lease = group.lease
        attributes = {
            "quartet.run": self._state.run_id,
            "quartet.instance": lease.instance.instance_id,
            "quartet.attempt": lease.attempt,
        }
        about = log_fields(run=self._state.run_id, group=lease.instance.instance_id, version=self._state.policy_version)
        traced = tracing.span("rollout", lease.instance.traceparent, kind="consumer", attributes=attributes)
        with about, traced as span:
            group.traceparent = span.traceparent
            try:
                self._settled(group, await self._make_and_upload(group))
            except Exception as error:
                await self._give_back(group, released(error))
                if isinstance(error, EngineError) and not isinstance(error, PromptError):
                    self._on_engine_failed(f"engine: {error}")

    async def _make_and_upload(self, group: Group) -> int:
        """Return the broker's PutOutcome."""
        made = await group.make(await self._leases.unscored(group.lease) if group.lease.unscored else b"")
        group.stage = Stage.UPLOADING
        self._state.changes.notify()
        made.header.traceparent = group.traceparent
        with tracing.span("put"):
            return await self._uploads.put(group.lease.lease_id, made)

    def _settled(self, group: Group, outcome: int) -> None:
        self._groups.pop(group.lease.lease_id, None)
        name = broker_pb2.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_").lower()
        GROUPS.labels(name).inc()
        if outcome == broker_pb2.PUT_OUTCOME_ACCEPTED:
            self._state.groups_total += 1
        else:
            log.info("group not stored", extra={"group": group.lease.instance.instance_id, "outcome": name})

    async def _give_back(self, group: Group, error: LeaseReleased) -> None:
        lease = group.lease
        outcome = "refused" if error.permanent else "failed" if error.counted else "given_back"
        GROUPS.labels("unscored" if error.unscored else outcome).inc()
        log.info(
            "prompt given back: %s",
            error,
            extra={"group": lease.instance.instance_id, "attempt": lease.attempt, "permanent": error.permanent},
        )
        failure = encodable(str(error), _LONGEST_FAILURE) if error.counted else ""
        release = broker_pb2.LeaseRelease(lease_id=lease.lease_id, failure=failure, permanent=error.permanent)
        if len(error.unscored) > LARGEST_GROUP:
            release.failure += f"; its {len(error.unscored)} bytes of completions are not kept: they fit no message"
        elif error.unscored:
            release.unscored = error.unscored
            await self._leases.release([release], timeout=None)  # it stays in _groups, so its lease is renewed
            return
        self._groups.pop(lease.lease_id, None)
        await self._leases.release([release])

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
