"""The groups under way: one task each, and what becomes of their leases.

How many completions the engine gets at once is found by watching its KV cache, as how much of it a completion will need
is known only when it has ended (additive increase, multiplicative decrease, as TCP does with a path of unknown width).
While completions wait inside the engine although its cache is full, the window is what runs at that moment; while the
whole window runs and the cache has room to spare, it grows by an eighth for every half of it that has finished.
"""

import asyncio
from collections.abc import Callable

from quartet.v1 import broker_pb2

from quartet_common import tracing
from quartet_common.log import get_logger, log_fields
from quartet_common.text import encodable, error_text
from quartet_rollout.broker import LeaseRenewer, UploadBatcher, UploadRefused
from quartet_rollout.engines.base import EngineStats
from quartet_rollout.environments import Environments
from quartet_rollout.generation import PromptRefused, completions_per_prompt
from quartet_rollout.group import Group, LeaseReleased, Stage, pinned_version
from quartet_rollout.metrics import GROUPS, LEASES
from quartet_rollout.scoring import Scorer
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

_LONGEST_FAILURE = 2000


_GROWTH = 8
_SPARE = 0.1
"""The cache has room to spare while its use is that much below the limit."""


class Concurrency:
    """The window, in completions."""

    def __init__(self, most: int, kv_cache_limit: float):
        """Begins with `most`: an engine that has no KV cache to report gets that many for ever."""
        self._most, self._limit = most, kv_cache_limit
        self.window = most
        self._finished = 0
        self._next_growth = 0

    def finished(self, completions: int) -> None:
        """So many completions have left the engine."""
        self._finished += completions

    def observe(self, stats: EngineStats, generating: int, least: int) -> int:
        """Take note of what the engine does; return the window.

        Args:
            generating: completions that were given to it and have not ended.
            least: the window is never smaller, e.g. a group.
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
    """All groups under way, by lease."""

    def __init__(
        self,
        state: RolloutState,
        keeper: LeaseRenewer,
        scorer: Scorer,
        putter: UploadBatcher,
        environments: Environments,
        concurrency: Concurrency,
        instance_id: str,
        on_engine_failed: Callable[[str], None],
    ):
        """`on_engine_failed` is told when the engine can generate no more: the service must end."""
        self._state, self._leases, self._scorer, self._uploads = state, keeper, scorer, putter
        self._environments, self._concurrency = environments, concurrency
        self._instance_id, self._on_engine_failed = instance_id, on_engine_failed
        self._groups: dict[str, Group] = {}
        self._tasks: dict[str, asyncio.Task] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def generating(self) -> int:
        """Completions that are being generated."""
        return sum(group.n - group.generated for group in self._groups.values() if group.stage is Stage.GENERATING)

    @property
    def unsettled(self) -> int:
        """Completions of all groups under way."""
        return sum(group.n for group in self._groups.values())

    async def start(self, leases: list[broker_pb2.PromptLease]) -> None:
        """Take leases on; those that cannot be worked on now are given back at once."""
        unwanted = []
        for lease in leases:
            pinned = pinned_version(lease.instance) if not lease.unscored else None
            if not self._state.may_lease or pinned not in (None, self._state.policy_version):
                unwanted.append(broker_pb2.LeaseRelease(lease_id=lease.lease_id))
                GROUPS.labels("given_back").inc()
                continue
            self._start(lease)
        LEASES.set(len(self._groups))
        if unwanted:
            await self._leases.give_back(unwanted)

    async def give_back_unstarted(self, releases: list[broker_pb2.LeaseRelease], run_id: str) -> None:
        """Give back leases of a run that this rollout does not work for any more; not counted."""
        GROUPS.labels("given_back").inc(len(releases))
        await self._leases.give_back(releases, run_id=run_id)

    def _start(self, lease: broker_pb2.PromptLease) -> None:
        spec = self._state.spec
        assert spec is not None  # `may_lease` says so
        try:
            n = completions_per_prompt(lease.instance.prompt, spec, lease.instance.purpose)
        except PromptRefused:
            n = 1  # refused in its task, like everything else that is wrong with a prompt
        lease_id = lease.lease_id
        group = self._groups[lease_id] = Group(lease, spec, n)
        if lease.unscored:
            group.stage = Stage.SCORING
        group.on_generated = lambda: self._generated(group)
        self._leases.hold(lease_id, lambda: self._lost(lease_id))
        task = asyncio.create_task(self._live(self._groups[lease_id]), name=f"group {lease.instance.instance_id}")
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._gone(lease_id))

    def _generated(self, group: Group) -> None:
        self._concurrency.finished(group.n)
        self._state.changes.notify()  # The engine has room: it must not wait for the verifiers.

    def _gone(self, lease_id: str) -> None:
        del self._groups[lease_id], self._tasks[lease_id]
        LEASES.set(len(self._groups))
        self._state.changes.notify()

    def _lost(self, lease_id: str) -> None:
        """The broker gave the prompt to someone else."""
        log.info("lease lost", extra={"group": self._groups[lease_id].lease.instance.instance_id, "lease": lease_id})
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
            await self._make_and_put(group)

    async def _make_and_put(self, group: Group) -> None:
        lease, engine, reader = group.lease, self._state.engine, self._state.reader
        assert engine is not None and reader is not None
        try:
            if lease.unscored:
                made = await group.score_again(await self._leases.unscored(lease), self._scorer)
            else:
                made = await group.make(engine, reader, self._scorer, self._environments, self._instance_id)
            group.stage = Stage.PUTTING
            self._state.changes.notify()
            made.header.traceparent = group.traceparent
            with tracing.span("put"):
                outcome = await self._uploads.put(lease.lease_id, made)
            self._settled(lease, outcome)
        except LeaseReleased as error:
            await self._give_back(lease, str(error), error.failure, error.permanent, error.unscored)
            if error.engine_failed:
                self._on_engine_failed(error.failure)
        except UploadRefused as error:
            log.error("a group was refused: %s", error, extra={"group": lease.instance.instance_id})
            await self._give_back(lease, "the broker refused it", f"put refused: {error}", permanent=False)
        except Exception as error:  # one prompt must not stop the service; the failure counts, and is seen
            log.exception("a group failed", extra={"group": lease.instance.instance_id})
            await self._give_back(lease, "failed", f"rollout: {error_text(error)}", permanent=False)

    def _settled(self, lease: broker_pb2.PromptLease, outcome: int) -> None:
        self._leases.settled(lease.lease_id)
        name = broker_pb2.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_").lower()
        GROUPS.labels(name).inc()
        if outcome == broker_pb2.PUT_OUTCOME_ACCEPTED:
            self._state.groups_total += 1
        else:
            log.info("group not stored", extra={"group": lease.instance.instance_id, "outcome": name})

    async def _give_back(
        self, lease: broker_pb2.PromptLease, reason: str, failure: str, permanent: bool, unscored: bytes = b""
    ) -> None:
        outcome = "unscored" if unscored else "refused" if permanent else "failed" if failure else "given_back"
        GROUPS.labels(outcome).inc()
        log.info(
            "prompt given back: %s",
            failure or reason,
            extra={"group": lease.instance.instance_id, "attempt": lease.attempt, "permanent": permanent},
        )
        release = broker_pb2.LeaseRelease(
            lease_id=lease.lease_id,
            failure=encodable(failure, _LONGEST_FAILURE),
            permanent=permanent,
            unscored=unscored,
        )
        if unscored:
            await self._leases.set_aside(release)
        else:
            await self._leases.give_back([release])

    async def flush(self, timeout: float) -> None:
        """Wait, at most `timeout` seconds, for the groups that are finished and only have to be put."""
        tasks = [self._tasks[lease_id] for lease_id, group in self._groups.items() if group.stage is Stage.PUTTING]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def give_back_all(self, reason: str, timeout: float = 10.0) -> None:
        """Stop all work and give its leases back; this does not count against the prompts."""
        tasks = dict(self._tasks)
        if not tasks:
            return
        log.info("giving back %d prompts: %s", len(tasks), reason)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        GROUPS.labels("given_back").inc(len(tasks))
        await self._leases.give_back((broker_pb2.LeaseRelease(lease_id=lease_id) for lease_id in tasks), timeout)
