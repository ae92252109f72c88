"""Membership of a run: wait for the broker and the run, register, send heartbeats, leave; switch to another run.

A heartbeat is sent every third of the run's `member_ttl`, and at once when the policy version or the state changes, so
that the trainer learns of new weights without delay.

A rollout that may work for several runs (`rollout.runs`) works for one at a time. It chooses the run with the fewest
rollouts, and stays until that run ends. It leaves earlier only for a run with at least two rollouts fewer. All rollouts
read the same members from the broker, and only the one with the last name leaves, so they do not all leave at once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import grpc
from quartet.v1 import broker_pb2, common_pb2

from quartet_common.durations import to_seconds
from quartet_common.errors import describe
from quartet_common.log import get_logger, set_run
from quartet_common.outage import Outage
from quartet_common.sampling import SamplingParameters, given
from quartet_rollout.broker import TRANSIENT, BrokerLink
from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine
from quartet_rollout.generation import TAKEN_BY, not_taken
from quartet_rollout.state import DrainStage, RolloutState
from quartet_server.host import ServiceHost

log = get_logger(__name__)

_SERVES = "serves."
_WILD = frozenset("*?[")
_ACTIVE = broker_pb2.RUN_STATE_ACTIVE

# Delay before registering again with a run that rejected this member.
_REJECTED_SECONDS = 1.0

NO_MASKS = (
    "this engine does not return the candidates of its tokens; allowed: the transformers engine, the vllm engine "
    "with VLLM_USE_V2_MODEL_RUNNER=0"
)


class Membership:
    """This rollout's membership, in one run at a time."""

    def __init__(
        self,
        state: RolloutState,
        link: BrokerLink,
        host: ServiceHost,
        address: str,
        runs: Iterable[str],
        teachers: Sequence[str],
        on_new_run: Callable[[str], Awaitable[None]],
        on_run_ended: Callable[[str], Awaitable[None]],
    ):
        """
        Args:
            address: where peers reach this rollout.
            runs: names of the runs that it may work for, or shell patterns.
            teachers: names of those that it can call.
            on_new_run: awaited with the reason before registering with another run, or with a new run of the same name;
                must discard the state of the last one.
            on_run_ended: awaited with the reason when the run has ended or is left for another.
        """
        self._state, self._link, self._host, self._address = state, link, host, address
        self._on_new_run, self._on_run_ended = on_new_run, on_run_ended
        self._patterns, self._teachers = tuple(runs), teachers
        self._only = None if len(self._patterns) > 1 or _WILD & set(self._patterns[0]) else self._patterns[0]
        """The only run it may work for, or None if there may be several."""
        self._heartbeat_requested = self.registered = False
        if self._only is None:
            # Tells the other rollouts which runs this one could switch to.
            host.capabilities.extend(_SERVES + pattern for pattern in self._patterns)
        state.run_id = self._only or ""

    def request_heartbeat(self) -> None:
        """Send a heartbeat now: the broker answered that this rollout is not a member."""
        self._heartbeat_requested = True
        self._state.changes.notify()

    async def run(self) -> None:
        """Maintain the membership until cancelled. Raises grpc.RpcError for errors that retries cannot cure."""
        while (engine := self._state.engine) is None:
            await self._state.changes.wait()
        while not self._state.draining:  # then a member that has left must not register again
            if self._state.drain is not DrainStage.NONE:
                if self._state.drain is DrainStage.LEAVING:
                    self._state.drain = DrainStage.OUT
                    self._state.changes.notify()
                await self._state.changes.wait()
                continue
            await self._link.handshake()
            run = await self._next_run(engine)
            if reason := _unfit(engine, run, self._teachers):
                log.error("this rollout cannot serve the run: %s", reason, extra={"run": run.spec.run_id})
                self._host.stop(reason, exit_code=1)
                return
            await self._switch_run(run)
            if await self._register() and (ended := await self._send_heartbeats(run, engine)):
                await self._stop(ended)

    async def _next_run(self, engine: Engine) -> broker_pb2.Run:
        """Wait for an active run; return the one that has the fewest rollouts."""
        outage = Outage()
        patterns = ", ".join(f"'{pattern}'" for pattern in self._patterns)
        awaited = f"run {patterns} to be created" if self._only else f"an active run of {patterns}"
        while not (candidates := await self._candidates(engine, self._link.call_with_retry)):
            self._host.waiting.add(awaited)
            await outage.wait()
        self._host.waiting.discard(awaited)
        return min(candidates, key=_rank).run

    async def _candidates(self, engine: Engine, call: Callable[..., Awaitable[Any]]) -> list[broker_pb2.GetRunResponse]:
        """Return the active runs that it may work for; with patterns, only those that its engine can serve. Raises what
        `call` raises."""
        if self._only is not None:
            names = [self._only]
        else:
            names, request = [], broker_pb2.ListRunsRequest()
            while True:
                page = await call(self._link.stub.ListRuns, request)
                able = [
                    run.spec.run_id
                    for run in page.runs
                    if run.state == _ACTIVE and not _unfit(engine, run, self._teachers)
                ]
                names += [name for name in able if any(fnmatchcase(name, pattern) for pattern in self._patterns)]
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        found = []
        for name in names:
            try:
                response = await call(self._link.stub.GetRun, broker_pb2.GetRunRequest(run_id=name))
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:  # not created yet, or just deleted
                    continue
                raise
            if response.run.state == _ACTIVE:
                found.append(response)
        return found

    async def _switch_run(self, run: broker_pb2.Run) -> None:
        """Work for this run from now on. The last run's weights must never be reported as this run's."""
        state, run_id = self._state, run.spec.run_id
        last = state.run
        if last is None:
            state.run_id = run_id
            set_run(run_id)
        elif (last.spec.run_id, last.created_at) != (run_id, run.created_at):
            reason = (
                f"the rollout went over to run '{run_id}'" if last.spec.run_id != run_id else "the run was recreated"
            )
            log.info(reason, extra={"run": run_id, "last": last.spec.run_id})
            await self._stop(reason)
            state.changing_run = True
            state.run, state.run_id, state.run_number = None, run_id, state.run_number + 1
            set_run(run_id)
            try:
                await self._on_new_run(reason)
            finally:
                state.changing_run = False
                state.changes.notify()

    async def _register(self) -> bool:
        """Return whether the run took this rollout as a member."""
        request = broker_pb2.RegisterMemberRequest(run_id=self._state.run_id, member=self._member())
        try:
            response = await self._link.call_with_retry(self._link.stub.RegisterMember, request)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                raise
            log.info("the run takes no members: %s", describe(error), extra={"run": self._state.run_id})
            await asyncio.sleep(_REJECTED_SECONDS)
            return False
        self.registered, self._state.run = True, response.run
        self._state.active = response.run.state == _ACTIVE
        self._state.changes.notify()
        log.info("member of the run", extra={"run": self._state.run_id, "epoch": response.group_epoch})
        return True

    async def _send_heartbeats(self, run: broker_pb2.Run, engine: Engine) -> str:
        """Send heartbeats while this rollout is a member; return why it must leave the run, or "" to register again."""
        ttl = to_seconds(run.spec.member_ttl) or 15.0
        while True:
            if self._state.drain in (DrainStage.LEAVING, DrainStage.OUT):
                return "it drains"
            sent_at, sent = time.monotonic(), self._reported_state()
            self._heartbeat_requested = False
            request = broker_pb2.HeartbeatRequest(run_id=self._state.run_id, member=self._member())
            try:
                response = await self._link.call(self._link.stub.Heartbeat, request, timeout=max(1.0, ttl / 3))
                if response.run_state != _ACTIVE:
                    return "the run has ended"
                if other := await self._understaffed_run(engine):
                    return f"run '{other}' has fewer rollouts"
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    log.warning("no longer a member: %s", describe(error), extra={"run": self._state.run_id})
                    self._state.active = self.registered = False
                    return ""
                if error.code() not in TRANSIENT:
                    raise
                await asyncio.sleep(min(1.0, ttl / 6))
                continue
            while not self._heartbeat_requested and self._reported_state() == sent:
                left = sent_at + ttl / 3 - time.monotonic()
                if left <= 0:
                    break
                await self._state.changes.wait(left)

    async def _understaffed_run(self, engine: Engine) -> str | None:
        """Return the run that this rollout should switch to, or None. Raises grpc.RpcError."""
        if self._only is not None or self._state.draining:
            return None
        candidates = {one.run.spec.run_id: one for one in await self._candidates(engine, self._link.call)}
        mine = candidates.pop(self._state.run_id, None)
        if mine is None or not candidates:
            return None
        other = min(candidates.values(), key=_rank)
        name = other.run.spec.run_id
        if len(_rollouts(mine)) - len(_rollouts(other)) < 2:
            return None
        able = [member.instance_id for member in _rollouts(mine) if _serves(member, name)]
        return name if able and max(able) == self._state.instance_id else None

    async def _stop(self, reason: str) -> None:
        """End the work for the run and leave it. Its weights stay until the rollout switches to another run."""
        log.info("leaving the run: %s", reason, extra={"run": self._state.run_id})
        self._state.active = False
        self._state.changes.notify()
        await self._on_run_ended(reason)
        await self.leave()

    async def leave(self) -> None:
        """Leave the run; if the broker cannot be reached, the membership expires."""
        if not self.registered:
            return
        self.registered = self._state.active = False
        request = broker_pb2.LeaveMemberRequest(run_id=self._state.run_id, instance_id=self._state.instance_id)
        try:
            await self._link.call(self._link.stub.LeaveMember, request, timeout=2.0)
        except grpc.RpcError as error:
            log.info("could not leave the run: %s", describe(error), extra={"run": self._state.run_id})

    def _reported_state(self) -> tuple:
        return self._state.policy_version, self._member_state(), self._state.drain

    def _member_state(self) -> broker_pb2.MemberState:
        if self._state.draining or self._state.drain is not DrainStage.NONE:
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
                "tokens_per_second": self._state.tokens_per_second,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_cache_use": stats.kv_cache_use,
                "groups_total": self._state.groups_total,
            },
            waiting_for="; ".join(self._host.waiting),
        )


def _rollouts(found: broker_pb2.GetRunResponse) -> list[broker_pb2.Member]:
    return [member for member in found.members if member.kind == common_pb2.SERVICE_KIND_ROLLOUT]


def _rank(found: broker_pb2.GetRunResponse) -> tuple[int, int, int, str]:
    """Sort key: fewest rollouts first, then the oldest run."""
    created = found.run.created_at
    return len(_rollouts(found)), created.seconds, created.nanos, found.run.spec.run_id


def _serves(member: broker_pb2.Member, run_id: str) -> bool:
    patterns = (name.removeprefix(_SERVES) for name in member.capabilities if name.startswith(_SERVES))
    return any(fnmatchcase(run_id, pattern) for pattern in patterns)


def _unfit(engine: Engine, run: broker_pb2.Run, teachers: Sequence[str]) -> str | None:
    """Return why this engine cannot serve the run, or None."""
    if run.spec.sampling_masks and "sampling_masks" not in engine.capabilities():
        return f"run.sampling_masks is true, and {NO_MASKS}, or false"
    if run.spec.router_replay and "routed_experts" not in engine.capabilities():
        return (
            "run.router_replay is true, and this engine does not record which experts tokens go to; allowed: the "
            "transformers engine with a mixture of experts that chooses by top-k scores, vLLM with "
            "rollout.vllm.enable_return_routed_experts = true, or false"
        )
    if unknown := [name for name in run.spec.teachers if name not in teachers]:
        return (
            f"run.teachers has '{unknown[0]}', of which this rollout has no address; set "
            f"run.teachers.{unknown[0]}.address in its run file"
        )
    for part in ("sampling", "evaluation_sampling"):
        sampling = SamplingParameters.model_construct(**given(getattr(run.spec, part)))
        for name, value in not_taken(engine, sampling).items():
            return f"run.{part}.{name} is {value}, which this rollout's engine does not take; {TAKEN_BY}"
    return None
