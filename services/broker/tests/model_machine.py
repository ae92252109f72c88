"""The machine that drives two runs through the broker and through `model_reference` at once, and compares.

What a test of single transitions cannot see comes of the order here: late holders of leases, old trainers, answers that
were lost (calls made twice), groups put in another order, a clock that jumps, a Redis that lost the end of its log.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import hypothesis.strategies as st
import redis
from frozen_redis import BEGIN, FrozenRedis
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_reference import LEASE_TTL, MEMBER_TTL, OPEN, RESULT_TTL, Clock, Reference, Refused, Spec
from model_view import look
from quartet.v1 import broker_pb2 as pb
from quartet.v1.experience_pb2 import ExperienceGroup
from world import EVALUATE, SERVE, TRAIN, World, group, instance

from quartet_broker import keys
from quartet_common.durations import to_duration

PURPOSES = {"TRAIN": TRAIN, "SERVE": SERVE, "EVALUATE": EVALUATE}
ROLLOUTS = ("r1", "r2")
DAY = 86_400_000


@dataclass
class Lease:
    """A lease that was granted once; all are kept, so that late holders come back."""

    granted: pb.PromptLease
    version: int


@dataclass
class Side:
    """A run: in the broker, in the reference, and what its trainer has in its weights."""

    world: World
    model: Reference
    leases: list[Lease]
    weights: list[list[str]]  # what each step trained, of the lineage that survives
    old_sessions: list[int]
    dropped: set[str]  # what its trainer ever took out of a batch
    photograph: tuple[dict[bytes, bytes], Reference] | None = None


@dataclass
class Bench:
    """What the machine works on, made once."""

    loop: asyncio.AbstractEventLoop
    stub: Any
    server: FrozenRedis
    redis: redis.Redis
    sweep: Callable[[str], Awaitable]
    steps: int = 0  # rules done so far, over all examples


specs = st.builds(
    Spec,
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    max_deliveries=st.integers(1, 3),
    max_queued_prompts=st.sampled_from([12, 24, 100]),
    max_experience_bytes=st.sampled_from([600, 2500, 1 << 20]),
    fresh_first=st.booleans(),
    train_partial=st.booleans(),
)
sides = st.sampled_from([0, 0, 0, 1])  # the second run is there to be left alone
twice = st.sampled_from([1, 1, 1, 2])  # the answer was lost: the call is made again
# Which of the leases ever granted, counted from the newest: most often one that may still be held.
picks = st.lists(st.integers(0, 24), min_size=1, max_size=6)
sizes = st.sampled_from([0, 50, 300, 900])
_numbers = itertools.count()


def _bytes_of(put: ExperienceGroup) -> int:
    """Return what a group counts for: all that is kept of it."""
    transcript = len(put.transcript)
    content = ExperienceGroup(header=put.header, tensors=put.tensors)
    return len(content.SerializeToString()) + transcript


class BrokerMachine(RuleBasedStateMachine):
    """Two runs. Each rule is one call or a few; after each, all that stands in Redis is compared."""

    bench: Bench
    calm = False  # no rule is under way, and none failed

    @initialize(first=specs, second=specs, steps=st.integers(0, 3))
    def begin(self, first: Spec, second: Spec, steps: int) -> None:
        self.clock = Clock(BEGIN)
        self.latest = BEGIN  # the latest time ever seen
        self._set_clock(BEGIN)
        self.sides: list[Side] = []
        for spec in (first, second):
            world = World(self.bench.stub, None, f"model-{next(_numbers)}")
            side = Side(world, Reference(spec, self.clock), [], [], [], set())
            self.sides.append(side)
            self._create(side)
            self._open(side, 0, [])
        self.submit(0, [(n, 0) for n in range(12)], 1)
        self.a_few_steps(0, steps)
        self.submit(1, [(n, 0) for n in range(5)], 1)

    def _create(self, side: Side) -> None:
        spec = side.model.spec
        create = side.world.create(
            members=(),
            groups_per_step=spec.groups_per_step,
            max_staleness=spec.max_staleness,
            max_deliveries=spec.max_deliveries,
            max_queued_prompts=spec.max_queued_prompts,
            max_experience_bytes=spec.max_experience_bytes,
            lease_order=pb.LEASE_ORDER_FRESH_FIRST if spec.fresh_first else pb.LEASE_ORDER_FIFO,
            partial_batch=pb.PARTIAL_BATCH_POLICY_TRAIN if spec.train_partial else pb.PARTIAL_BATCH_POLICY_DROP,
            prompt_lease_ttl=to_duration(LEASE_TTL / 1000),
            member_ttl=to_duration(MEMBER_TTL / 1000),
            result_ttl=to_duration(RESULT_TTL / 1000),
        )
        self._do(create)
        for name in ROLLOUTS:
            self._do(side.world.register(name, address="here:1"))
            side.model.register(name, "here:1")

    def teardown(self) -> None:
        """End of an example: nothing of it is left, and neither run was touched on the way."""
        if self.calm:
            self._compare(self.sides)
        self.bench.redis.flushdb()

    # --- comparing

    def _do(self, call: Awaitable) -> Any:
        return self.bench.loop.run_until_complete(call)

    def _both(self, expect: Callable[[], Any], call: Awaitable, answer: Callable[[Any], Any]) -> Any:
        """Ask the reference and the broker; their answers, or refusals, must be the same. Return them."""
        try:
            expected = expect()
        except Refused as refusal:
            expected = refusal
        try:
            came = answer(self._do(call))
        except grpc.RpcError as error:
            assert isinstance(expected, Refused), f"refused: {error.details()}; expected {expected}"
            assert error.code().name == str(expected), error.details()
            return None
        assert came == expected
        return came

    def _compare(self, compared: list[Side]) -> None:
        pictures = look(self.bench.redis, [side.world.run_id for side in compared])
        for side, came in zip(compared, pictures, strict=True):
            expected = side.model.picture()
            came["stats"] = {name: came["stats"].get(name, 0) for name in expected["stats"]}
            for part, value in expected.items():
                assert came[part] == value, part

    @invariant()
    def both_agree(self) -> None:
        """All that stands in Redis is as the reference has it, and training was exactly once."""
        self.bench.steps += 1
        side = self.sides[self.touched]
        self._compare([side])
        model = side.model
        trained = [name for batch in side.weights for name in batch]
        assert len(trained) == len(set(trained)), "trained twice"
        booked = model.names("TRAINED", "COMMITTED")
        assert not set(trained) - set(booked), "trained, and not in the books"
        # A group that was dropped in the part of the log that Redis lost is in its batch again; that step is in the
        # checkpoint, and so the books take it for trained. It is not trained again, nor lost: its trainer dropped it.
        assert not set(booked) - set(trained) - side.dropped, "in the books, and not trained"
        self.calm = True

    def _side(self, number: int) -> Side:
        self.touched, self.calm = number, False
        return self.sides[number]

    # --- clients

    @rule(
        side=sides,
        names=st.lists(st.tuples(st.integers(0, 39), st.sampled_from([0] * 15 + [1])), min_size=1, max_size=10),
        times=twice,
    )
    def submit(self, side: int, names: list[tuple[int, int]], times: int) -> None:
        """Training prompts; some are there already, a few with another content."""
        self._submit(self._side(side), [(f"p{n}", "TRAIN", content, None) for n, content in names], "", times)

    @rule(
        side=sides,
        kind=st.sampled_from(["SERVE", "SERVE", "EVALUATE"]),
        numbers=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        pinned=st.sampled_from([None, None, 0, 1]),
        times=twice,
    )
    def other_prompts(self, side: int, kind: str, numbers: list[int], pinned: int | None, times: int) -> None:
        """Prompts of someone who wants the completions, or of an evaluation set, which waits outside of the queue."""
        if kind == "SERVE":
            self._submit(self._side(side), [(f"s{n}", kind, 0, pinned) for n in numbers], "", times)
        else:
            self._submit(self._side(side), [(f"e{n}", kind, 0, None) for n in numbers], "heldout", times)

    def _submit(self, side: Side, items: list[tuple], evaluation_set: str, times: int) -> None:
        instances = [
            instance(name, f"{content}=?", PURPOSES[purpose], **({} if pinned is None else {"pinned_version": pinned}))
            for name, purpose, content, pinned in items
        ]
        told = [(name, purpose, (content, pinned), pinned) for name, purpose, content, pinned in items]
        for _ in range(times):
            request = pb.SubmitPromptsRequest(
                run_id=side.world.run_id, instances=instances, evaluation_set=evaluation_set
            )
            self._both(
                lambda: side.model.submit(told, evaluation_set),
                self.bench.stub.SubmitPrompts(request),
                lambda response: (response.accepted, response.duplicates),
            )

    def _feed(self, side: Side) -> None:
        """The client submits when few prompts are left."""
        if len(side.model.names("QUEUED")) < 4 and not side.model.ended and side.model.state == "ACTIVE":
            known = len(side.model.groups)
            self._submit(side, [(f"f{known + n}", "TRAIN", 0, None) for n in range(6)], "", 1)

    @rule(side=sides, version=st.integers(0, 3), times=twice)
    def start_evaluation(self, side: int, version: int, times: int) -> None:
        """The stored set, at a version."""
        side = self._side(side)
        for _ in range(times):
            request = pb.StartEvaluationRequest(
                run_id=side.world.run_id, evaluation_set="heldout", policy_version=version
            )
            self._both(
                lambda: side.model.start_evaluation("heldout", version),
                self.bench.stub.StartEvaluation(request),
                lambda response: response.prompts,
            )

    @rule(side=sides, what=st.sampled_from(["requeue"] * 5 + ["list"] * 3 + ["end"] * 2 + ["finish"]), times=twice)
    def rare_calls_of_clients(self, side: int, what: str, times: int) -> None:
        """Some of the dead, or all, are queued again or shown; the prompts or the run end."""
        side = self._side(side)
        for _ in range(times):
            match what:
                case "requeue":
                    self._requeue_dead(side, [])
                    self._requeue_dead(side, [*sorted(side.model.dead)[::2], "p0", "p1"])
                case "list":
                    self._list_dead(side)
                case "end":
                    self._both(side.model.end_prompts, side.world.end_prompts(), lambda response: response)
                case "finish":
                    self._both(
                        lambda: side.model.finish("CANCELLED"),
                        side.world.finish(pb.RUN_STATE_CANCELLED),
                        lambda response: pb.RunState.Name(response.run.state).removeprefix("RUN_STATE_"),
                    )

    def _requeue_dead(self, side: Side, names: list[str]) -> None:
        self._both(
            lambda: side.model.requeue_dead(names),
            self.bench.stub.RequeueDead(pb.RequeueDeadRequest(run_id=side.world.run_id, instance_ids=names)),
            lambda response: response.requeued,
        )

    def _list_dead(self, side: Side) -> None:
        self._both(
            side.model.list_dead,
            self.bench.stub.ListDead(pb.ListDeadRequest(run_id=side.world.run_id)),
            lambda response: [(d.instance.instance_id, d.attempts, list(d.reasons)) for d in response.dead],
        )

    # --- members and time

    @rule(side=sides, name=st.sampled_from(ROLLOUTS), how=st.sampled_from(["beat"] * 4 + ["move", "leave"]))
    def member(self, side: int, name: str, how: str) -> None:
        """A rollout lives, comes anew at another address, or goes."""
        side = self._side(side)
        if how == "leave":
            request = pb.LeaveMemberRequest(run_id=side.world.run_id, instance_id=name)
            self._both(
                lambda: side.model.leave(name),
                self.bench.stub.LeaveMember(request),
                lambda response: response.group_epoch,
            )
        elif how == "move":
            self._both(
                lambda: side.model.register(name, "there:2"),
                side.world.register(name, address="there:2"),
                lambda response: response.group_epoch,
            )
        elif name in side.model.members:
            self._heartbeat(side, name)
        else:
            self._register(side, name)

    def _heartbeat(self, side: Side, name: str) -> None:
        member = pb.Member(instance_id=name, state=pb.MEMBER_STATE_ACTIVE)
        self._both(
            lambda: side.model.heartbeat(name),
            self.bench.stub.Heartbeat(pb.HeartbeatRequest(run_id=side.world.run_id, member=member)),
            lambda response: (response.group_epoch, response.policy_version),
        )

    def _register(self, side: Side, name: str) -> None:
        self._both(
            lambda: side.model.register(name, "here:1"),
            side.world.register(name, address="here:1"),
            lambda response: response.group_epoch,
        )

    @rule(by=st.sampled_from([1, 1000, -1, -1000, LEASE_TTL // 2, -LEASE_TTL, LEASE_TTL, MEMBER_TTL, -DAY, DAY]))
    def clock_jumps(self, by: int) -> None:
        """Redis' clock goes forward or back. Nothing is looked at: what was due is found out by whoever comes next."""
        self.touched = 0
        self._set_clock(self.clock.now + by)

    @rule(side=sides, off=st.sampled_from([-1, 0, 0, 1]), which=st.integers(0, 3))
    def clock_jumps_to_an_end(self, side: int, off: int, which: int) -> None:
        """To the millisecond at which a member or a result ends, or beside it; then comes a sweep."""
        side = self._side(side)
        ends = list(side.model.members.values())
        ends += [finished + RESULT_TTL for kept in side.model.results.values() for finished in kept.values()]
        if ends:
            self._set_clock(sorted(ends)[which % len(ends)] + off)
            self._sweep(side)

    def _set_clock(self, now: int) -> None:
        self.clock.now = now
        self.latest = max(self.latest, now)
        self.bench.server.set_clock(now)

    @rule(side=sides, which=st.integers(0, 5), off=st.sampled_from([-1, 0, 0, 1]), first=st.integers(0, 4))
    def last_moment_of_a_lease(self, side: int, which: int, off: int, first: int) -> None:
        """In the millisecond in which it ends, or beside it, come its holder, the sweep, and whoever has it next."""
        side = self._side(side)
        held = [lease for lease in side.leases if side.model.holds(lease.granted.lease_id)]
        held = held or self._granted(side, 3, side.model.version)
        if not held:
            return
        lease = held[which % len(held)]
        name, lease_id = lease.granted.instance.instance_id, lease.granted.lease_id
        self._set_clock(side.model.groups[name].expiry + off)
        acts = [
            lambda: self._renew(side, [lease_id]),
            lambda: self._put(side, [lease], 50),
            lambda: self._release(side, [lease_id], "broken"),
            lambda: self._granted(side, 2, side.model.version),
            lambda: self._sweep(side),
        ]
        for act in acts[first:] + acts[:first]:
            act()
            self._compare([side])

    @rule(side=sides)
    def sweep(self, side: int) -> None:
        """What the broker does from time to time."""
        self._sweep(self._side(side))

    def _sweep(self, side: Side) -> None:
        side.model.sweep()
        self._do(self.bench.sweep(side.world.run_id))

    # --- rollouts

    @rule(side=sides, holder=st.sampled_from(ROLLOUTS), most=st.integers(1, 6), lag=st.integers(-1, 2))
    def lease(self, side: int, holder: str, most: int, lag: int) -> None:
        """Ask for prompts, with weights that may be behind."""
        side = self._side(side)
        self._feed(side)
        self._granted(side, most, max(-1, side.model.version - lag), holder)

    def _granted(self, side: Side, most: int, version: int, holder: str = "r1") -> list[Lease]:
        leases: list[Lease] = []

        def answer(response: pb.LeasePromptsResponse) -> tuple:
            leases.extend(Lease(each, version) for each in response.leases)
            for each in response.leases:
                side.model.granted(each.instance.instance_id, each.lease_id)
            gate = pb.GateReason.Name(response.gate).removeprefix("GATE_REASON_")
            given = [(each.instance.instance_id, each.attempt) for each in response.leases]
            return given, "" if gate == "UNSPECIFIED" else gate

        self._both(
            lambda: side.model.lease_prompts(holder, most, version),
            side.world.ask(most, version, holder=holder),
            answer,
        )
        side.leases += leases
        return leases

    def _picked(self, side: Side, picked: list[int]) -> list[Lease]:
        """Leases of the past, in any order, some more than once; now and then one of the other run."""
        other = next(each for each in self.sides if each is not side)
        known = [*other.leases[-1:], *side.leases]
        return [known[-1 - n % len(known)] for n in picked] if known else []

    @rule(
        side=sides,
        picked=picks,
        size=sizes,
        mixed=st.sampled_from([0, 0, 0, 1]),
        swapped=st.sampled_from([False] * 7 + [True]),
        full=st.sampled_from([None] * 3 + [0, 1]),
        times=twice,
    )
    def put(
        self, side: int, picked: list[int], size: int, mixed: int, swapped: bool, full: int | None, times: int
    ) -> None:
        """Several groups at once, in any order: with tokens of two versions if `mixed`, each with another's lease if
        `swapped`, the first so large that all that is stored comes to the limit, or to a byte more (`full`)."""
        side = self._side(side)
        leases = self._picked(side, picked)
        if full is not None and leases:
            size = self._size_to(side, leases[0], side.model.spec.max_experience_bytes + full)
        for _ in range(times if leases else 0):
            self._put(side, leases, size, mixed, swapped)

    def _size_to(self, side: Side, lease: Lease, limit: int) -> int:
        """Return the size of a group's tensors with which the groups stored come to `limit` bytes."""
        version, size = max(0, lease.version), 0
        for _ in range(2):  # a length takes more bytes the greater it is
            total = side.model.bytes_of(*OPEN) + _bytes_of(group(lease.granted, version, size=size).group)
            size = min(max(0, size + limit - total), 5000)
        return size

    def _put(self, side: Side, leases: list[Lease], size: int, mixed: int = 0, swapped: bool = False) -> None:
        puts = []
        for n, lease in enumerate(leases):
            version = max(0, lease.version)
            put = group(lease.granted, version, version + mixed, size + n)
            if swapped:
                put.lease_id = leases[n - 1].granted.lease_id
            puts.append(put)
        told = [
            (
                put.group.header.instance_id,
                put.lease_id,
                _bytes_of(put.group),
                put.group.header.min_policy_version,
                put.group.header.max_policy_version,
            )
            for put in puts
        ]
        self._both(lambda: side.model.put(told), side.world.put(*puts), lambda outcomes: outcomes)

    @rule(side=sides, most=st.integers(2, 6), lag=st.integers(0, 2), size=sizes)
    def roll_out(self, side: int, most: int, lag: int, size: int) -> None:
        """Ask, generate, put: what rollouts do."""
        side = self._side(side)
        self._feed(side)
        leases = self._granted(side, most, max(0, side.model.version - lag))
        if leases:
            self._put(side, leases[::-1], size)

    @rule(side=sides, picked=picks, how=st.sampled_from(["renew", "renew", "", "broken", "for good"]), times=twice)
    def renew_or_release(self, side: int, picked: list[int], how: str, times: int) -> None:
        """Leases that are held, and leases that were lost long ago, are renewed or given back."""
        side = self._side(side)
        ids = [lease.granted.lease_id for lease in self._picked(side, picked)]
        for _ in range(times):
            if how == "renew":
                self._renew(side, ids)
            else:
                self._release(side, ids, how)

    def _renew(self, side: Side, ids: list[str]) -> None:
        self._both(
            lambda: side.model.renew(ids),
            self.bench.stub.RenewLeases(pb.RenewLeasesRequest(run_id=side.world.run_id, lease_ids=ids)),
            lambda response: list(response.lost),
        )

    def _release(self, side: Side, ids: list[str], failure: str) -> None:
        told = [(lease_id, failure, failure == "for good") for lease_id in ids]
        releases = [pb.LeaseRelease(lease_id=lease, failure=why, permanent=last) for lease, why, last in told]
        self._both(
            lambda: side.model.release(told),
            self.bench.stub.ReleaseLeases(pb.ReleaseLeasesRequest(run_id=side.world.run_id, releases=releases)),
            lambda response: (response.requeued, response.dead, list(response.lost)),
        )

    # --- the trainer

    @rule(side=sides, off=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def lease_experience(self, side: int, off: int) -> None:
        """The step that is due, one again, or one too early."""
        side = self._side(side)
        self._take(side, max(0, self._due(side) + off))

    def _due(self, side: Side) -> int:
        short = [step for step, state in side.model.batch_state.items() if state == "SHORT"]
        return min(short, default=side.model.next_step())

    def _take(self, side: Side, step: int, session: int | None = None) -> None:
        model, session = side.model, side.world.session if session is None else session
        self._both(
            lambda: model.lease_batch(session, step),
            side.world.take(step, session=session),
            lambda answer: self._manifest(side, *answer),
        )

    def _manifest(self, side: Side, manifest: pb.BatchManifest, groups: list) -> dict[str, object]:
        if manifest.run_finished:
            return {"run_finished": True}
        if not manifest.granted:
            return {"ready": manifest.ready, "needed": manifest.needed, "end_of_data": manifest.end_of_data}
        ids = list(manifest.instance_ids)
        assert [each.header.instance_id for each in groups] == ids
        return {"instance_ids": ids, "replayed": manifest.replayed, "end_of_data": manifest.end_of_data}

    @rule(side=sides, off=st.sampled_from([0, 0, 1, -1]), numbers=st.lists(st.integers(0, 9), min_size=1), times=twice)
    def drop(self, side: int, off: int, numbers: list[int], times: int) -> None:
        """Groups without an advantage, and some that are not in the batch."""
        side = self._side(side)
        step = max(0, side.model.version + off)
        batch = side.model.batches.get(step) or ["p0"]
        names = [batch[n % len(batch)] for n in numbers[:2]] + [f"p{n}" for n in numbers[2:3]]
        for _ in range(times):
            self._both(
                lambda: side.model.drop(side.world.session, step, names),
                side.world.drop(step, *names),
                lambda dropped: dropped,
            )
        side.dropped |= {name for name in names if name in side.model.names("DROPPED")}

    @rule(side=sides, off=st.sampled_from([0, 0, 0, -1, 1]), times=twice)
    def mark_trained(self, side: int, off: int, times: int) -> None:
        """The step that is due, one that was marked, or one too early."""
        side = self._side(side)
        step = max(0, side.model.version + off)
        for _ in range(times):
            self._mark(side, step)

    def _mark(self, side: Side, step: int) -> None:
        before = side.model.version
        batch = list(side.model.batches.get(step, ()))
        self._both(
            lambda: side.model.mark_trained(side.world.session, step), side.world.trained(step), lambda version: version
        )
        if side.model.version > before:
            side.weights.append(batch)

    @rule(side=sides, behind=st.integers(-1, 3), times=twice)
    def commit(self, side: int, behind: int, times: int) -> None:
        """A checkpoint became durable."""
        side = self._side(side)
        target = max(0, side.model.version - behind)
        for _ in range(times):
            self._both(
                lambda: side.model.commit(side.world.session, target), side.world.commit(target), lambda groups: groups
            )

    @rule(side=sides, back=st.integers(0, 3), tell=st.booleans())
    def crash(self, side: int, back: int, tell: bool) -> None:
        """The trainer starts again, from a durable checkpoint or from one that is too old."""
        side = self._side(side)
        checkpoint = max(0, side.model.version - back)
        self._open(side, checkpoint, side.weights[:checkpoint] if tell else [])

    def _open(self, side: Side, checkpoint: int, consumed: list[list[str]]) -> None:
        names = [name for batch in consumed for name in batch]
        old = side.world.session

        def expect() -> int:
            return side.model.open(checkpoint, names, max(side.model.session + 1, self.clock.now))

        came = self._both(expect, side.world.open(checkpoint, names), lambda response: response.replayable_steps)
        if came is not None:
            assert side.world.session == side.model.session > old, (side.world.session, side.model.session, old)
            side.old_sessions.append(old)
            side.weights = side.weights[:checkpoint]

    @rule(side=sides, picked=st.integers(0, 5))
    def the_old_trainer_comes_back(self, side: int, picked: int) -> None:
        """Nothing it says counts."""
        side = self._side(side)
        old, step = side.old_sessions[-1 - picked % len(side.old_sessions)], side.model.version
        self._take(side, step, session=old)
        world, model = side.world, side.model
        self._both(lambda: model.mark_trained(old, step), world.trained(step, session=old), lambda version: version)
        self._both(lambda: model.commit(old, step), world.commit(step, session=old), lambda groups: groups)
        request = pb.DropExperienceRequest(run_id=world.run_id, session_epoch=old, step=step, instance_ids=["p0"])
        self._both(
            lambda: model.drop(old, step, ["p0"]),
            self.bench.stub.DropExperience(request),
            lambda response: response.dropped,
        )

    # What a run does most of the time, so that the rest happens in the middle of a run: Hypothesis takes the rule whose
    # name comes first more often.
    @rule(side=sides, steps=st.integers(1, 3))
    def a_few_steps(self, side: int, steps: int) -> None:
        """Steps without any trouble."""
        side = self._side(side)
        for _ in range(steps):
            self._get_ready(side)
            self._mark(side, side.model.version)

    @rule(side=sides)
    def work_ahead(self, side: int) -> None:
        """Two batches at once, and the later one is said to be trained first."""
        side = self._side(side)
        self._get_ready(side)
        self._get_ready(side)
        self._mark(side, side.model.version + 1)

    def _get_ready(self, side: Side) -> None:
        """A batch, if the gate and the prompts allow."""
        if side.model.members.get("r1", 0) <= self.clock.now:
            self._register(side, "r1")
        self._feed(side)
        leases = self._granted(side, 6, side.model.version)
        if leases:
            self._put(side, leases, 50)
        self._take(side, self._due(side))

    # --- a Redis that forgets

    @rule(side=sides)
    def photograph(self, side: int) -> None:
        """From here on, what follows may turn out not to have been on Redis' disk."""
        self._photograph(self._side(side))

    def _photograph(self, side: Side) -> None:
        names = self.bench.redis.keys(keys.prefix(side.world.run_id) + "*")
        with self.bench.redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.dump(name)
            side.photograph = dict(zip(names, pipeline.execute(), strict=True)), side.model.copy()

    @precondition(lambda self: any(side.photograph for side in self.sides))
    @rule(back=st.integers(0, 3))
    def redis_loses_the_end_of_its_log(self, back: int) -> None:
        """Redis comes back as it was, the trainer from a checkpoint it has, rollouts with leases that never were."""
        self._lose(self._side(0 if self.sides[0].photograph else 1), back)

    def _lose(self, side: Side, back: int) -> None:
        keys_then, model_then = side.photograph
        committed, version = side.model.committed, side.model.version
        with self.bench.redis.pipeline() as pipeline:
            pipeline.delete(*self.bench.redis.keys(keys.prefix(side.world.run_id) + "*"))
            for name, value in keys_then.items():
                pipeline.restore(name, 0, value)
            pipeline.execute()
        side.model = model_then.copy()
        self._set_clock(self.latest + 1000)  # it takes time to come back
        self._compare([side])
        checkpoint = max(committed, version - back)
        self._open(side, checkpoint, side.weights[:checkpoint])

    @rule(side=sides, stage=st.integers(0, 4), back=st.sampled_from([0, 0, 1]))
    def redis_forgets_a_step(self, side: int, stage: int, back: int) -> None:
        """The last that is on its disk is the prompts, the leases, the ready groups, the batch, or the trained step."""
        side = self._side(side)
        if side.model.members.get("r1", 0) <= self.clock.now:
            self._register(side, "r1")
        self._feed(side)
        leases: list[Lease] = []
        for number, happens in enumerate(
            (
                lambda: leases.extend(self._granted(side, 6, side.model.version)),
                lambda: self._put(side, leases, 50) if leases else None,
                lambda: self._take(side, self._due(side)),
                lambda: self._mark(side, side.model.version),
                lambda: None,
            )
        ):
            if number == stage:
                self._photograph(side)
            happens()
        self._lose(side, back)
