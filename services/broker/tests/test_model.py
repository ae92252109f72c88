"""The broker beside a plain-Python reference: whatever order things happen in, both agree on every group and count.

The short form; the long one is the same machine with more examples (`--hypothesis-profile`, or HYPOTHESIS_EXAMPLES).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import hypothesis.strategies as st
import pytest
from conftest import serving
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from world import World, group

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "40"))
STEP, STALENESS, DELIVERIES = 2, 1, 3


@dataclass
class Reference:
    """What must be true, without Redis: lists in order of what comes next."""

    state: dict[str, str] = field(default_factory=dict)
    attempt: dict[str, int] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    held: dict[str, object] = field(default_factory=dict)  # lease of each leased instance
    ready: list[tuple[str, int]] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    version: int = 0
    committed: int = 0
    ended: bool = False

    def count(self, state: str) -> int:
        return sum(value == state for value in self.state.values())

    def expected_lease(self, most: int, version: int) -> list[str]:
        under_way = self.count("LEASED") + self.count("READY") + self.count("LEASED_TO_TRAINER")
        room = (min(version, self.version) - self.version + STALENESS + 1) * STEP - under_way
        return (self.again + self.fresh)[: max(0, min(most, room))]

    def requeue(self, name: str, attempt: int) -> None:
        self.state[name], self.attempt[name] = "QUEUED", attempt
        self.again.append(name)

    def failed(self, name: str, permanent: bool = False) -> None:
        del self.held[name]
        if permanent or self.attempt[name] >= DELIVERIES:
            self.state[name] = "DEAD"
        else:
            self.requeue(name, self.attempt[name])

    def next_step(self) -> int:
        return max([self.version, *(step + 1 for step in self.batches)])


class BrokerMachine(RuleBasedStateMachine):
    """Drives one run through both. Every lease ever granted is kept, so that late holders come back."""

    loop: asyncio.AbstractEventLoop
    stub: object
    redis: object
    sweep: Callable[[str], Awaitable]
    runs = 0

    def do(self, call):
        return self.loop.run_until_complete(call)

    def refused(self, call) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            self.do(call)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    @initialize(steps=st.integers(0, 4))
    def begin(self, steps):
        BrokerMachine.runs += 1
        self.world = World(self.stub, self.redis, f"model-{BrokerMachine.runs}")
        self.model = Reference()
        self.leases: list = []
        self.do(self.world.create(max_staleness=STALENESS, groups_per_step=STEP, max_deliveries=DELIVERIES))
        self.do(self.world.open())
        self.old_session = self.world.session - 1
        # The sets in the surviving checkpoints: what each step trained.
        self.weights: list[list[str]] = []
        self.submit([f"p{n}" for n in range(12)])
        self.work(steps)

    @rule(names=st.lists(st.sampled_from([f"p{n}" for n in range(40)]), min_size=3, max_size=12))
    def submit(self, names):
        new = [name for name in dict.fromkeys(names) if name not in self.model.state]
        response = self.do(self.world.submit(*names))
        assert response.accepted == len(new) and response.duplicates == len(names) - len(new)
        for name in new:
            self.model.state[name], self.model.attempt[name] = "QUEUED", 0
            self.model.fresh.append(name)

    @rule(most=st.integers(1, 6), lag=st.integers(0, 2))
    def lease(self, most, lag):
        self.granted(most, lag)

    def granted(self, most: int, lag: int) -> list:
        version = max(0, self.model.version - lag)
        expected = self.model.expected_lease(most, version)
        leases = self.do(self.world.lease(most, version))
        assert [lease.instance.instance_id for lease in leases] == expected
        for lease in leases:
            name = lease.instance.instance_id
            (self.model.again if name in self.model.again else self.model.fresh).remove(name)
            self.model.attempt[name] += 1
            assert lease.attempt == self.model.attempt[name]
            self.model.state[name], self.model.held[name] = "LEASED", lease
            self.leases.append((lease, version))
        return self.leases[-len(leases) :] if leases else []

    @rule(most=st.integers(2, 6), lag=st.integers(0, 1))
    def roll_out(self, most, lag):
        for lease, version in self.granted(most, lag):
            self.put_one(lease, version)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def put(self, data):
        self.put_one(*data.draw(st.sampled_from(self.leases)))

    def put_one(self, lease, version: int) -> None:
        name, model = lease.instance.instance_id, self.model
        if model.state[name] not in ("QUEUED", "LEASED", "DEAD"):
            expected = "DUPLICATE"
        elif model.held.get(name) is not lease:
            expected = "LEASE_LOST"
        elif model.version - version > STALENESS:
            expected = "STALE"
            del model.held[name]
            model.requeue(name, 0)
        else:
            expected = "ACCEPTED"
            del model.held[name]
            model.state[name] = "READY"
            model.ready.append((name, version))
        assert self.do(self.world.put(group(lease, version))) == [expected]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["drain", "failure", "permanent"]))
    def release(self, data, how):
        lease, _ = data.draw(st.sampled_from(self.leases))
        name, model = lease.instance.instance_id, self.model
        held = model.held.get(name) is lease
        failure = "" if how == "drain" else "broken"
        response = self.do(self.world.release(lease.lease_id, failure, how == "permanent"))
        assert list(response.lost) == ([] if held else [lease.lease_id])
        if held and how == "drain":
            del model.held[name]
            model.requeue(name, model.attempt[name] - 1)
        elif held:
            model.failed(name, how == "permanent")

    @rule()
    def time_passes(self):
        self.do(self.world.expire_leases())
        self.do(self.sweep(self.world.run_id))
        for name in sorted(self.model.held):
            self.model.failed(name)
        # Leases that end together go back in no particular order: take it from Redis.
        order = self.do(self.world.queue("prompts:again"))
        assert sorted(order) == sorted(self.model.again)
        self.model.again = order

    @rule()
    def lease_experience(self):
        model = self.model
        step = next((s for s, ids in sorted(model.batches.items()) if len(ids) < STEP), model.next_step())
        for name, version in list(model.ready):
            if version < step - STALENESS:
                model.ready.remove((name, version))
                model.requeue(name, 0)
        have = model.batches.get(step, [])
        manifest, groups = self.do(self.world.take(step))
        if len(have) + len(model.ready) >= STEP:
            taken = [name for name, _ in model.ready[: STEP - len(have)]]
            model.ready = model.ready[len(taken) :]
            model.batches[step] = have + taken
            for name in taken:
                model.state[name] = "LEASED_TO_TRAINER"
            assert manifest.granted and list(manifest.instance_ids) == model.batches[step]
            assert [g.header.instance_id for g in groups] == model.batches[step]
        else:
            assert not manifest.granted and manifest.ready == len(model.ready)

    @precondition(lambda self: any(len(ids) == STEP for ids in self.model.batches.values()))
    @rule(data=st.data())
    def lease_again(self, data):
        step = data.draw(st.sampled_from([s for s, ids in self.model.batches.items() if len(ids) == STEP]))
        manifest, _ = self.do(self.world.take(step))
        assert manifest.replayed and list(manifest.instance_ids) == self.model.batches[step]

    @precondition(lambda self: self.model.batches.get(self.model.version))
    @rule(data=st.data())
    def drop(self, data):
        step = self.model.version
        name = data.draw(st.sampled_from(self.model.batches[step]))
        assert self.do(self.world.drop(step, name)) == 1
        self.model.batches[step].remove(name)
        self.model.state[name] = "DROPPED"

    # What a run does most of the time, so that the rest happens in the middle of a run.
    @rule(steps=st.integers(1, 3))
    def work(self, steps):
        for _ in range(steps):
            for lease, version in self.granted(6, 0):
                self.put_one(lease, version)
            self.lease_experience()
            self.mark_trained()

    @rule()
    def mark_trained(self):
        model, step = self.model, self.model.version
        if len(model.batches.get(step, [])) < STEP:
            self.refused(self.world.trained(step))
            return
        assert self.do(self.world.trained(step)) == step + 1
        for name in model.batches[step]:
            model.state[name] = "TRAINED"
        model.trained.add(step)
        model.version += 1
        self.weights.append(list(model.batches[step]))

    @rule(behind=st.integers(-1, 3))
    def commit(self, behind):
        model = self.model
        target = max(0, model.version - behind)
        if target > model.version:
            self.refused(self.world.commit(target))
            return
        self.settle(target)
        self.do(self.world.commit(target))

    def settle(self, target: int) -> None:
        for step in [step for step in self.model.batches if step < target]:
            for name in self.model.batches.pop(step):
                self.model.state[name] = "COMMITTED"
        self.model.committed = max(self.model.committed, target)

    @rule(data=st.data(), tell=st.booleans())
    def crash(self, data, tell):
        """The trainer starts again from some durable checkpoint."""
        model = self.model
        checkpoint = data.draw(st.integers(model.committed, model.version))
        consumed = [name for batch in self.weights[:checkpoint] for name in batch] if tell else []
        self.old_session = self.world.session
        opened = self.do(self.world.open(checkpoint, consumed))
        self.weights = self.weights[:checkpoint]
        model.version = checkpoint
        for step, ids in model.batches.items():
            if step >= checkpoint:
                for name in ids:
                    model.state[name] = "LEASED_TO_TRAINER"
        self.settle(checkpoint)
        assert opened.replayable_steps == sum(len(ids) == STEP for ids in model.batches.values())

    @rule()
    def the_old_trainer_comes_back(self):
        for call in (
            self.world.take(self.model.version, session=self.old_session),
            self.world.trained(self.model.version, session=self.old_session),
            self.world.commit(self.model.version, session=self.old_session),
        ):
            self.refused(call)

    @invariant()
    def both_agree(self):
        run = self.do(self.world.run())
        model, stats = self.model, run.stats
        for name in ("queued", "leased", "ready", "leased_to_trainer", "trained", "dead", "dropped", "committed"):
            assert getattr(stats, name) == model.count(name.upper()), name
        assert (run.policy_version, run.committed_step) == (model.version, model.committed)
        expected = {name: (state, model.attempt[name]) for name, state in model.state.items()}
        assert self.do(self.world.states(list(expected))) == expected
        trained = [name for batch in self.weights for name in batch]
        assert len(trained) == len(set(trained)), "trained twice"


@pytest.mark.slow
def test_the_broker_agrees_with_a_plain_reference(redis_server):
    loop = asyncio.new_event_loop()
    BrokerMachine.loop = loop
    # The periodic sweep would expire leases between a rule and its check: it is called by hand.
    context = serving(redis_server.url, sweep_interval=60)
    stub, servicer, _ = loop.run_until_complete(context.__aenter__())
    BrokerMachine.sweep = staticmethod(lambda run_id: servicer.store.run("sweep", run_id))
    BrokerMachine.stub, BrokerMachine.redis = stub, servicer.store.redis
    try:
        run_state_machine_as_test(
            BrokerMachine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize="HYPOTHESIS_EXAMPLES" not in os.environ,
                database=None,
            ),
        )
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()
