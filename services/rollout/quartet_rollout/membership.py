"""Membership of the run: wait for the broker and the run, register, beat, leave; go over to another run.

The heartbeat goes out every third of the run's `member_ttl`, and at once when the policy version or the state changes,
so that the trainer learns of new weights without delay.

Where a rollout may work for several runs (`rollout.runs`), it works for one at a time. It goes to the run with the
fewest rollouts, and stays until that run ends. It leaves earlier only for a run that has two fewer than its own: then
the one that is last by name goes, so that they do not all go at once. All read the same members, the broker's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import grpc
from quartet.v1 import broker_pb2, common_pb2

from quartet_common.durations import to_seconds
from quartet_common.errors import describe
from quartet_common.host import ServiceHost
from quartet_common.log import get_logger, set_run
from quartet_common.outage import Outage
from quartet_common.sampling import SamplingParameters, given
from quartet_rollout.broker import TRANSIENT, BrokerLink
from quartet_rollout.engines.base import UNKNOWN_VERSION
from quartet_rollout.generation import TAKEN_BY, not_taken
from quartet_rollout.metrics import TokenRate
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

_SERVES = "serves."
_WILD = frozenset("*?[")


@dataclass(frozen=True)
class _Candidate:
    run: broker_pb2.Run
    rollouts: tuple[broker_pb2.Member, ...]

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Fewest rollouts first, then the oldest run."""
        made = self.run.created_at
        return len(self.rollouts), made.seconds, made.nanos, self.run.spec.run_id


class RunPool:
    """The runs of `rollout.runs`: names, or patterns as a shell's."""

    def __init__(
        self, patterns: Iterable[str], link: BrokerLink, instance_id: str, fits: Callable[[broker_pb2.Run], bool]
    ):
        """`fits` says whether this rollout's engine can do what a run asks."""
        self._patterns = tuple(patterns)
        self._link, self._instance_id, self._fits = link, instance_id, fits

    @property
    def only(self) -> str | None:
        """The one run there is to choose, or None where there may be several."""
        first, *others = self._patterns
        return None if others or _WILD & set(first) else first

    @property
    def capabilities(self) -> list[str]:
        """What the others of the pool have to know: the runs that this rollout could go to."""
        return [] if self.only else [_SERVES + pattern for pattern in self._patterns]

    def __str__(self) -> str:
        return ", ".join(f"'{pattern}'" for pattern in self._patterns)

    async def choose(self) -> str | None:
        """Return the active run with the fewest rollouts, None if there is no active one. Raises grpc.RpcError."""
        candidates = await self._candidates()
        return min(candidates, key=lambda one: one.rank).run.spec.run_id if candidates else None

    async def better(self, own: str) -> str | None:
        """Return the run that this rollout should leave its own for, or None. Raises grpc.RpcError."""
        candidates = {one.run.spec.run_id: one for one in await self._candidates()}
        mine = candidates.pop(own, None)
        if mine is None or not candidates:
            return None
        poorest = min(candidates.values(), key=lambda one: one.rank)
        name = poorest.run.spec.run_id
        if len(mine.rollouts) - len(poorest.rollouts) < 2:
            return None
        may_go = [member.instance_id for member in mine.rollouts if _serves(member, name)]
        return name if may_go and max(may_go) == self._instance_id else None

    async def _candidates(self) -> list[_Candidate]:
        runs = (await self._link.call("ListRuns", broker_pb2.ListRunsRequest())).runs
        return [
            found
            for run in runs
            if run.state == broker_pb2.RUN_STATE_ACTIVE
            and any(fnmatchcase(run.spec.run_id, pattern) for pattern in self._patterns)
            and self._fits(run)
            and (found := await self._look(run)) is not None
        ]

    async def _look(self, run: broker_pb2.Run) -> _Candidate | None:
        request = broker_pb2.GetRunRequest(run_id=run.spec.run_id)
        try:
            response = await self._link.call("GetRun", request)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:  # deleted meanwhile
                return None
            raise
        rollouts = (member for member in response.members if member.kind == common_pb2.SERVICE_KIND_ROLLOUT)
        return _Candidate(response.run, tuple(rollouts))


def _serves(member: broker_pb2.Member, run_id: str) -> bool:
    patterns = (name.removeprefix(_SERVES) for name in member.capabilities if name.startswith(_SERVES))
    return any(fnmatchcase(run_id, pattern) for pattern in patterns)


# How often a run that ended is looked at: somebody may make a new one under its name.
_ENDED_POLL_SECONDS = 5.0

NO_MASKS = (
    "this engine cannot tell the candidates of its tokens; allowed: the transformers engine, the vllm engine "
    "with VLLM_USE_V2_MODEL_RUNNER=0"
)

_ACTIVE = broker_pb2.RUN_STATE_ACTIVE


class Membership:
    """This rollout as a member of its run."""

    def __init__(
        self,
        state: RolloutState,
        link: BrokerLink,
        host: ServiceHost,
        address: str,
        rate: TokenRate,
        runs: Iterable[str],
        on_new_run: Callable[[str], Awaitable[None]],
        on_run_ended: Callable[[str], Awaitable[None]],
    ):
        """
        Args:
            address: where peers reach this rollout.
            runs: names and patterns of the runs that it may work for.
            on_new_run: awaited, with the reason, before registering with another run, or one made anew under the same
                name: nothing of the last one may be left then.
            on_run_ended: awaited, with the reason, when the run has ended or is left for another.
        """
        self._state, self._link, self._host, self._address, self._rate = state, link, host, address, rate
        self._on_new_run, self._on_run_ended = on_new_run, on_run_ended
        self._pool = RunPool(runs, link, state.instance_id, lambda run: self._unfit(run) is None)
        self._doubted = self._registered = False
        state.run_id = self._pool.only or ""
        host.capabilities.extend(self._pool.capabilities)

    def doubt(self) -> None:
        """Have the membership checked now: the broker said that this rollout is no member."""
        self._doubted = True
        self._state.changes.notify()

    async def run(self) -> None:
        """Keep the membership for as long as the service lives. Raises grpc.RpcError for what waiting cannot mend."""
        while self._state.engine is None:
            await self._state.changes.wait()
        while True:
            await self._link.introduce()
            if self._pool.only is None:
                await self._choose()
            run = await self._register()
            if reason := self._unfit(run):
                log.error("this rollout cannot serve the run: %s", reason, extra={"run": self._state.run_id})
                await self.leave()
                self._host.stop(reason, exit_code=1)
                return
            better = await self._beat(run) if run.state == _ACTIVE else None
            if better is not None:
                await self._stop(f"run '{better}' has fewer rollouts")
                await self._go_over(better)
            elif run.state != _ACTIVE:
                await self._ended(run)

    async def _choose(self) -> None:
        """Wait for an active run of the pool, and go over to the one that has the fewest rollouts."""
        outage = Outage(first=0.2, longest=1.0)
        thing = f"an active run of {self._pool}"
        while True:
            try:
                chosen = await self._pool.choose()
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise
            else:
                if chosen is not None:
                    break
                self._host.waiting.add(thing)
            await outage.wait()
        self._host.waiting.discard(thing)
        if chosen != self._state.run_id:
            await self._go_over(chosen)

    async def _go_over(self, run_id: str) -> None:
        """Work for another run from now on. Nobody may see the weights of the last one under the name of this one."""
        state = self._state
        last, state.changing_run = state.run_id, True
        state.run, state.run_id, state.run_number = None, run_id, state.run_number + 1
        set_run(run_id)
        try:
            await self._on_new_run(f"the rollout went over to run '{run_id}'")
        finally:
            state.changing_run = False
            state.changes.notify()
        log.info("works for another run", extra={"run": run_id, "last": last})

    def _unfit(self, run: broker_pb2.Run) -> str | None:
        """Return why this engine cannot do what the run asks of its rollouts, or None."""
        assert self._state.engine is not None  # `run` waits for it
        if run.spec.sampling_masks and "sampling_masks" not in self._state.engine.capabilities():
            return f"run.sampling_masks is true, and {NO_MASKS}, or false"
        if run.spec.router_replay and "routed_experts" not in self._state.engine.capabilities():
            return (
                "run.router_replay is true, and this engine does not record which experts tokens go to; allowed: the "
                "transformers engine with a mixture of experts that chooses by top-k scores, vLLM with "
                "rollout.vllm.enable_return_routed_experts = true, or false"
            )
        for part in ("sampling", "evaluation_sampling"):
            sampling = SamplingParameters.model_construct(**given(getattr(run.spec, part)))
            for name, value in not_taken(self._state.engine, sampling).items():
                return f"run.{part}.{name} is {value}, which this rollout's engine does not take; {TAKEN_BY}"
        return None

    async def leave(self) -> None:
        """Leave the run; a broker that cannot be reached finds out by the missing heartbeats."""
        if not self._registered:
            return
        self._registered = self._state.active = False
        request = broker_pb2.LeaveMemberRequest(run_id=self._state.run_id, instance_id=self._state.instance_id)
        try:
            await self._link.call("LeaveMember", request, timeout=2.0)
        except grpc.RpcError as error:
            log.info("could not leave the run: %s", describe(error), extra={"run": self._state.run_id})

    async def _register(self) -> broker_pb2.Run:
        outage = Outage(first=0.2, longest=1.0)
        while True:
            try:
                await self._recognise()
                request = broker_pb2.RegisterMemberRequest(run_id=self._state.run_id, member=self._member())
                response = await self._link.insist("RegisterMember", request)
            except grpc.RpcError as error:
                missing = error.code() == grpc.StatusCode.NOT_FOUND
                if not missing and error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                if self._pool.only is None:
                    await self._choose()
                elif missing:
                    self._host.waiting.add(f"run '{self._state.run_id}' to be created")
                else:
                    log.info("the run takes no members: %s", describe(error), extra={"run": self._state.run_id})
                await outage.wait()
                continue
            self._host.waiting.discard(f"run '{self._state.run_id}' to be created")
            self._registered = True
            self._take(response.run)
            log.info("member of the run", extra={"run": self._state.run_id, "epoch": response.group_epoch})
            return response.run

    async def _recognise(self) -> None:
        """If the run was deleted and made again, forget what belonged to the old one, before anyone sees it."""
        known = self._state.run
        if known is None:
            return
        response = await self._link.insist("GetRun", broker_pb2.GetRunRequest(run_id=self._state.run_id))
        if response.run.created_at != known.created_at:
            log.info("the run was made anew", extra={"run": self._state.run_id})
            self._state.run, self._state.run_number = None, self._state.run_number + 1
            await self._on_new_run("the run was made anew")

    def _take(self, run: broker_pb2.Run) -> None:
        self._state.run = run
        self._state.active = run.state == _ACTIVE
        self._state.changes.notify()

    async def _beat(self, run: broker_pb2.Run) -> str | None:
        """Beat until the member is gone (register again) or the run has ended (then `run.state` says so).

        Returns the run to go over to, where the pool has one that needs this rollout more.
        """
        ttl = to_seconds(run.spec.member_ttl) or 15.0
        while True:
            beaten_at, told = time.monotonic(), self._telling()
            self._doubted = False
            request = broker_pb2.HeartbeatRequest(run_id=self._state.run_id, member=self._member())
            try:
                response = await self._link.call("Heartbeat", request, timeout=max(1.0, ttl / 3))
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    log.warning("no longer a member: %s", describe(error), extra={"run": self._state.run_id})
                    self._state.active = self._registered = False
                    return None
                if error.code() not in TRANSIENT:
                    raise
                await asyncio.sleep(min(1.0, ttl / 6))
                continue
            if response.run_state != _ACTIVE:
                run.state = response.run_state
                return None
            if (better := await self._better()) is not None:
                return better
            while not self._doubted and self._telling() == told:
                left = beaten_at + ttl / 3 - time.monotonic()
                if left <= 0:
                    break
                await self._state.changes.wait(left)

    async def _ended(self, run: broker_pb2.Run) -> None:
        """The run has ended: stop its work, leave it, and wait until a new one is made under its name."""
        name = broker_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
        log.info("the run has ended", extra={"run": self._state.run_id, "state": name})
        await self._stop("the run has ended")
        if self._pool.only is None:
            return
        thing = f"a new run '{self._state.run_id}' (the last one {name})"
        self._host.waiting.add(thing)
        request = broker_pb2.GetRunRequest(run_id=self._state.run_id)
        while True:
            await asyncio.sleep(_ENDED_POLL_SECONDS)
            try:
                response = await self._link.insist("GetRun", request)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                break
            if response.run.state == _ACTIVE:
                break
        self._host.waiting.discard(thing)

    async def _stop(self, reason: str) -> None:
        """End the work for the run and leave it. Its weights stay until there is another one."""
        self._state.active = False
        self._state.changes.notify()
        await self._on_run_ended(reason)
        await self.leave()

    async def _better(self) -> str | None:
        """Return the run that needs this rollout more than its own; None if there is none, or nobody knows."""
        if self._pool.only is not None or self._state.draining:
            return None
        try:
            return await self._pool.better(self._state.run_id)
        except grpc.RpcError as error:
            if error.code() not in TRANSIENT:
                raise
            return None

    def _telling(self) -> tuple:
        return self._state.policy_version, self._member_state()

    def _member_state(self) -> broker_pb2.MemberState:
        if self._state.draining:
            return broker_pb2.MEMBER_STATE_DRAINING
        if self._state.policy_version == UNKNOWN_VERSION:
            return broker_pb2.MEMBER_STATE_JOINING
        return broker_pb2.MEMBER_STATE_ACTIVE

    def _member(self) -> broker_pb2.Member:
        assert self._state.engine is not None  # `run` waits for it
        stats = self._state.engine.stats()
        return broker_pb2.Member(
            instance_id=self._state.instance_id,
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address=self._address,
            capabilities=self._host.capabilities,
            state=self._member_state(),
            policy_version=self._state.policy_version,
            gauges={
                "tokens_per_second": self._rate.value,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_cache_use": stats.kv_cache_use,
                "groups_total": self._state.groups_total,
            },
            waiting_for="; ".join(self._host.waiting),
        )
