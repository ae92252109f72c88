"""One run at once in the broker and in `model_reference`: each call is made to both, and the answers are compared."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import redis
from frozen_redis import BEGIN, FrozenRedis
from model_books import OPEN, Clock, Refused
from model_reference import Reference, ledger_digest, problem_of
from quartet.v1 import broker_pb2 as pb
from quartet.v1.experience_pb2 import ExperienceGroup
from world import SERVE, TRAIN, World, group, instance

from quartet_broker import keys

PURPOSES = {"TRAIN": TRAIN, "SERVE": SERVE}
ROLLOUTS = ("r1", "r2")


@dataclass
class Bench:
    """What the machine works on, made once."""

    loop: asyncio.AbstractEventLoop
    stub: Any
    server: FrozenRedis
    redis: redis.Redis
    sweep: Callable[[str], Awaitable]
    clock: Clock = field(default_factory=lambda: Clock(BEGIN))
    latest: int = BEGIN  # the latest time that was ever
    steps: int = 0  # rules done so far, over all examples

    def do(self, call: Awaitable) -> Any:
        return self.loop.run_until_complete(call)

    def reset_clock(self) -> None:
        self.latest = BEGIN
        self.set_clock(BEGIN)

    def set_clock(self, now: int) -> None:
        self.clock.now = now
        self.latest = max(self.latest, now)
        self.server.set_clock(now)


@dataclass
class Lease:
    """A lease that was granted once; all are kept, so that late holders come back."""

    granted: pb.PromptLease
    version: int


@dataclass
class Run:
    """A run: in the broker, in the reference, and what its trainer has in its weights."""

    bench: Bench
    world: World
    model: Reference
    leases: list[Lease] = field(default_factory=list)
    weights: list[list[str]] = field(default_factory=list)  # what each step trained, of the lineage that survives
    old_sessions: list[int] = field(default_factory=list)
    pictures: list[tuple[dict[bytes, bytes], Reference]] = field(default_factory=list)
    hand: dict[int, list[str]] = field(default_factory=dict)  # batches that the trainer has, by step

    def compare(self) -> None:
        """Raise AssertionError unless the broker's books are right, and say of the run what the reference says."""
        states, summary = self.bench.do(self._audit())
        run = summary.run
        assert not summary.faults or self.model.committed < self.model.settle_to, summary.faults
        assert states == self.model.states()
        (sources,) = [self.bench.do(self.world.run()).sources]
        assert {each.name for each in sources} == set(self.model.sources)
        for each in sources:
            of = self.model.sources[each.name]
            assert (each.used, each.solved, each.hopeless, each.groups) == tuple(
                of.get(count, 0) for count in ("used", "solved", "hopeless", "groups")
            )
            assert each.accuracy == pytest.approx(of.get("accuracy", 0.0), rel=1e-6)
        stats = self.model.stats()
        assert {name: getattr(run.stats, name) for name in stats} == stats
        state = pb.RunState.Name(run.state).removeprefix("RUN_STATE_")
        model = self.model
        assert (state, run.policy_version, run.committed_step) == (model.state, model.version, model.committed)

    async def _audit(self) -> tuple[dict[str, tuple[str, int, int]], pb.AuditSummary]:
        *pages, end = [part async for part in self.world.call("AuditRun")]
        return {
            record.instance_id: (
                pb.GroupState.Name(record.state).removeprefix("GROUP_STATE_"),
                record.attempt,
                record.step,
            )
            for part in pages
            for record in part.page.instances
        }, end.summary

    def check_training(self) -> None:
        """Raise AssertionError unless each group that is in the weights is there once, and booked so."""
        trained = [name for batch in self.weights for name in batch]
        assert len(trained) == len(set(trained)), "trained twice"
        booked = self.model.names("TRAINED", "COMMITTED")
        assert not set(trained) - set(booked), "trained, and not in the books"
        assert not set(booked) - set(trained), "in the books, and not trained"

    def create(self) -> None:
        spec = {field.name: value for field, value in self.model.spec.ListFields()}
        self.bench.do(self.world.create(members=(), **spec))
        for name in ROLLOUTS:
            self.register(name)

    def both(
        self, expect: Callable[[], Any], call: Awaitable, answer: Callable[[Any], Any] = lambda response: response
    ) -> Any:
        """Ask the reference and the broker; their answers, or refusals, must be the same. Return them."""
        try:
            expected = expect()
        except Refused as refusal:
            expected = refusal
        try:
            came = answer(self.bench.do(call))
        except grpc.RpcError as error:
            assert isinstance(expected, Refused), f"refused: {error.details()}; expected {expected}"
            assert error.code().name == str(expected), error.details()
            return None
        assert came == expected
        return came

    def submit(self, items: list[tuple], times: int = 1) -> None:
        """Submit (name, purpose, content, pinned version) of each, some times over."""
        instances = [
            instance(name, f"{content}=?", PURPOSES[purpose], **({} if pinned is None else {"pinned_version": pinned}))
            for name, purpose, content, pinned in items
        ]
        for each in instances:
            each.prompt.prompt_id, each.source = problem_of(each.instance_id)
        told = [(name, purpose, (content, pinned), pinned) for name, purpose, content, pinned in items]
        for _ in range(times):
            self.both(
                lambda: self.model.submit(told),
                self.world.call("SubmitPrompts", instances=instances),
                lambda response: (response.accepted, response.duplicates),
            )

    def feed(self) -> None:
        """The client submits when few prompts are left."""
        if len(self.model.names("QUEUED")) < 4 and not self.model.ended and self.model.state == "ACTIVE":
            known = len(self.model.groups)
            self.submit([(f"f{known + n}", "TRAIN", 0, None) for n in range(6)])

    def requeue_dead(self, names: list[str]) -> None:
        self.both(lambda: self.model.requeue_dead(names), self.world.requeue_dead(*names))

    def heartbeat(self, name: str) -> None:
        self.both(
            lambda: self.model.heartbeat(name),
            self.world.call("Heartbeat", member=pb.Member(instance_id=name, state=pb.MEMBER_STATE_ACTIVE)),
            lambda response: (response.group_epoch, response.policy_version),
        )

    def register(self, name: str, address: str = "here:1") -> None:
        self.both(
            lambda: self.model.register(name, address),
            self.world.register(name, address=address),
            lambda response: response.group_epoch,
        )

    def sweep(self) -> None:
        self.model.sweep()
        self.bench.do(self.bench.sweep(self.world.run_id))

    def granted(self, most: int, version: int, holder: str = "r1") -> list[Lease]:
        """Ask for prompts; return what was granted."""
        leases: list[Lease] = []

        def answer(response: pb.LeasePromptsResponse) -> tuple:
            leases.extend(Lease(each, version) for each in response.leases)
            for each in response.leases:
                self.model.granted(each.instance.instance_id, each.lease_id)
            gate = pb.GateReason.Name(response.gate).removeprefix("GATE_REASON_")
            given = [(each.instance.instance_id, each.attempt) for each in response.leases]
            return given, "" if gate == "UNSPECIFIED" else gate

        self.both(
            lambda: self.model.lease_prompts(holder, most, version),
            self.world.ask(most, version, holder=holder),
            answer,
        )
        self.leases += leases
        return leases

    def size_to(self, lease: Lease, limit: int) -> int:
        """Return the size of a group's tensors with which the groups stored come to `limit` bytes."""
        version, size = max(0, lease.version), 0
        for _ in range(2):  # a length takes more bytes the greater it is
            total = self.model.bytes_of(*OPEN) + _bytes_of(judged_group(lease.granted, version, version, size).group)
            size = min(max(0, size + limit - total), 5000)
        return size

    def put(self, leases: list[Lease], size: int, mixed: int = 0, swapped: bool = False) -> None:
        """Put a group for each lease: with tokens of two versions if `mixed`, with another's lease if `swapped`."""
        puts = []
        for n, lease in enumerate(leases):
            version = max(0, lease.version)
            put = judged_group(lease.granted, version, version + mixed, size + n)
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
                None if put.group.header.unjudged else put.group.header.ans_acc,
            )
            for put in puts
        ]
        self.both(lambda: self.model.put(told), self.world.put(*puts))

    def renew(self, ids: list[str]) -> None:
        self.both(lambda: self.model.renew(ids), self.world.renew(*ids), lambda response: list(response.lost))

    def release(self, ids: list[str], failure: str) -> None:
        """Give leases back; "for good" is a failure that no repetition cures."""
        told = [(lease_id, failure, failure == "for good") for lease_id in ids]
        releases = [pb.LeaseRelease(lease_id=lease, failure=why, permanent=last) for lease, why, last in told]
        self.both(
            lambda: self.model.release(told),
            self.world.call("ReleaseLeases", releases=releases),
            lambda response: (response.requeued, response.dead, list(response.lost)),
        )

    def due(self) -> int:
        """Return the step whose batch is to be asked for next."""
        short = [step for step, state in self.model.batch_state.items() if state == "SHORT"]
        return min(short, default=self.model.next_step())

    def take(self, step: int, session: int | None = None) -> None:
        model, session = self.model, self.world.session if session is None else session
        self.both(
            lambda: model.lease_batch(session, step),
            self.world.take(step, session=session),
            lambda answer: self.manifest(step, *answer),
        )

    def manifest(self, step: int, manifest: pb.BatchManifest, groups: list) -> dict[str, object]:
        if manifest.run_finished:
            return {"run_finished": True}
        if not manifest.granted:
            return {"ready": manifest.ready, "needed": manifest.needed, "end_of_data": manifest.end_of_data}
        ids = list(manifest.instance_ids)
        self.hand[step] = ids
        assert [each.header.instance_id for each in groups] == ids
        return {"instance_ids": ids, "replayed": manifest.replayed, "end_of_data": manifest.end_of_data}

    def mark(self, step: int) -> None:
        """Say that a step is trained, with the batch that the trainer has."""
        before = self.model.version
        batch = self.hand.get(step) or list(self.model.batches.get(step, ()))
        session = self.world.session
        self.both(lambda: self.model.mark_trained(session, step, batch), self.world.trained(step, ids=batch))
        if self.model.version > before:
            self.weights.append(batch)

    def open(self, checkpoint: int, consumed: list[list[str]] | None = None, falls_after: int | None = None) -> None:
        """Start a trainer from a checkpoint.

        Args:
            consumed: what an older trainer says that it trained last; None: this one settles its ledger.
            falls_after: calls of SettleTrained after which it falls, and begins once more.
        """
        names = None if consumed is None else [name for batch in consumed for name in batch]
        old = self.world.session

        def expect() -> tuple[int, int, str]:
            return self.model.open(checkpoint, names, max(self.model.session + 1, self.bench.clock.now))

        came = self.both(
            expect,
            self.world.open(checkpoint, names or (), settles_ledger=names is None),
            lambda response: (response.replayable_steps, response.settle_from_step, response.ledger_digest),
        )
        if came is None:
            return
        assert self.world.session == self.model.session > old, (self.world.session, self.model.session, old)
        self.old_sessions.append(old)
        self.weights, self.hand = self.weights[:checkpoint], {}
        if came[2]:
            assert came[2] == ledger_digest(self.weights[: came[1]]), "the books are of another history"
        for step in range(came[1], checkpoint) if names is None else ():
            if falls_after is not None and step - came[1] == falls_after:
                self.compare()
                return self.open(checkpoint)
            self.take(checkpoint)  # refused as long as something is missing
            self.settle_trained(step, self.weights[step])

    def settle_trained(self, step: int, names: list[str]) -> None:
        self.both(
            lambda: self.model.settle_trained(self.world.session, step, names),
            self.world.settle((step, names)),
            lambda response: (response.settled_steps, response.settled),
        )

    def drop(self, step: int, names: list[str]) -> None:
        self.both(lambda: self.model.drop(self.world.session, step, names), self.world.drop(step, *names))

    def get_ready(self) -> None:
        """A batch, if the gate and the prompts allow."""
        if self.model.members.get("r1", 0) <= self.bench.clock.now:
            self.register("r1")
        self.feed()
        leases = self.granted(6, self.model.version)
        if leases:
            self.put(leases, 50)
        self.take(self.due())

    def snapshot(self) -> None:
        names = self.bench.redis.keys(keys.prefix(self.world.run_id) + "*")
        with self.bench.redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.dump(name)
            self.pictures.append((dict(zip(names, pipeline.execute(), strict=True)), self.model.copy()))

    def lose(self, back: int, which: int = 0, lives: bool = False, falls_after: int | None = None) -> None:
        """Have Redis hold what it held at a snapshot, and the trainer start again from a checkpoint it has.

        Args:
            which: snapshot, counted from the newest; histories that were given up are among them.
            lives: the trainer goes on for a moment as if nothing had been.
        """
        keys_then, model_then = self.pictures[-1 - which % len(self.pictures)]
        committed, version = self.model.committed, self.model.version
        with self.bench.redis.pipeline() as pipeline:
            pipeline.delete(*self.bench.redis.keys(keys.prefix(self.world.run_id) + "*"))
            for name, value in keys_then.items():
                pipeline.restore(name, 0, value)
            pipeline.execute()
        self.model = model_then.copy()
        self.bench.set_clock(self.bench.latest + 1000)  # it takes time to come back
        self.compare()
        checkpoint = max(committed, version - back)
        for step in (len(self.weights), len(self.weights) + 1) if lives else ():
            self.mark(step)
            self.take(step)
            self.commit(max(0, step - 1))
        self.open(max(checkpoint, self.model.committed), falls_after=falls_after)

    def commit(self, step: int) -> None:
        """Say that the steps below are durable."""
        self.both(lambda: self.model.commit(self.world.session, step), self.world.commit(step))


def judged_group(lease: pb.PromptLease, version: int, newest: int, size: int) -> pb.PutGroup:
    """Return a group with an accuracy: of some problems always 1, of some 0; a few groups have none."""
    put, number = group(lease, version, newest, size), int(lease.instance.instance_id[1:])
    put.group.header.ans_acc = (1.0, 0.0, 0.5, number % 3 / 2)[number % 4]
    put.group.header.unjudged = 8 * (number % 11 == 5)
    return put


def _bytes_of(put: ExperienceGroup) -> int:
    """Return what a group counts for: all that is kept of it."""
    transcript = len(put.transcript)
    content = ExperienceGroup(header=put.header, tensors=put.tensors)
    return len(content.SerializeToString()) + transcript
