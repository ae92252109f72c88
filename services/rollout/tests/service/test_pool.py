"""Rollouts that may work for several runs: one at a time, and nothing of one run reaches another."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from many_runs import ManyRuns
from quartet.v1 import broker_pb2, rollout_pb2
from world import World, instance, neighbours, refused

QUICK = Duration(seconds=3)
"""A membership's ttl: a heartbeat a second, and with it a look at the other runs."""


@pytest.fixture
async def pool(tmp_path):
    """A broker of no runs yet; returns it and a maker of rollouts."""
    broker = ManyRuns()
    async with neighbours(tmp_path, broker) as make:

        async def rollout(*runs: str, **section) -> World:
            made = make()
            await made.start(runs=list(runs), **section)
            return made

        yield broker, rollout


def generate(rollout: World, run_id: str = "", tokens: int = 8):
    prompt = {"text": "x", "sampling": {"n": 1, "max_new_tokens": tokens}}
    call = rollout.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt, run_id=run_id), timeout=20)
    return asyncio.ensure_future(call)


async def works_for(rollout: World, run_id: str) -> None:
    members = rollout.broker.runs[run_id].members
    await rollout.until(lambda: rollout.host.instance_id in members and rollout.service.state.active)


async def test_two_runs_at_once_share_a_pool_and_see_nothing_of_each_other(pool):
    broker, rollout = pool
    one, two = broker.create("one"), broker.create("two")
    first = await rollout("one", "two")
    await works_for(first, "one")  # the older of two that have none
    second = await rollout("t*", "one")
    await works_for(second, "two")  # the one that has fewer

    await first.load(5, run_id="one")
    await second.load(9, run_id="two")
    for theirs, mine, other in ((first, "one", "two"), (second, "two", "one")):
        said = f"run_id: this rollout works for run '{mine}', the call is about '{other}'"
        for call in (
            theirs.join(2, run_id=other),
            theirs.begin(10, run_id=other),
            theirs.finish(10, run_id=other),
            theirs.abort(10, run_id=other),
            generate(theirs, other),
        ):
            assert await refused(call, grpc.StatusCode.FAILED_PRECONDITION) == said
        assert len((await generate(theirs, mine)).completions) == 1
    assert (first.engine.policy_version, second.engine.policy_version) == (5, 9)

    await one.submit(*(instance(f"one-{n}") for n in range(4)))
    await two.submit(*(instance(f"two-{n}") for n in range(4)))
    for run, version, made_by in ((one, 5, first), (two, 9, second)):
        await run.until(lambda run=run: len(run.puts) == 4)
        name = run.run.spec.run_id
        assert {put.group.header.instance_id for put in run.puts} == {f"{name}-{n}" for n in range(4)}
        assert {put.group.header.max_policy_version for put in run.puts} == {version}
        assert {run.transcript(n).rollout_id for n in range(4)} == {made_by.host.instance_id}
        assert set(run.members) == {made_by.host.instance_id}


async def test_when_its_run_ends_a_rollout_takes_the_next_with_nothing_of_the_last(pool):
    broker, rollout = pool
    one = broker.create("one")
    made = await rollout("*", lease_wait_seconds=30.0)
    await works_for(made, "one")
    await made.load(7, run_id="one", epoch=4)
    await one.until(lambda: one.lease_versions == [7])  # a request for prompts that waits
    assert len((await generate(made, "one")).completions) == 1

    one.run.state = broker_pb2.RUN_STATE_SUCCEEDED
    made.service.membership.doubt()
    await made.until(lambda: "an active run of '*'" in list(made.host.waiting))
    assert made.host.instance_id in one.left
    assert len((await generate(made, "one")).completions) == 1  # until there is another one

    two = broker.create("two")
    await works_for(made, "two")
    assert made.engine.policy_version == -1 and not list(two.lease_versions)
    said = await refused(generate(made), grpc.StatusCode.UNAVAILABLE)
    assert "no weights of a known version" in said
    await refused(generate(made, "one"), grpc.StatusCode.FAILED_PRECONDITION)
    await refused(made.join(5, run_id="one"), grpc.StatusCode.FAILED_PRECONDITION)
    await made.load(0, run_id="two", epoch=1)  # its epochs are counted anew

    await one.submit(instance("late"))  # granted to the request that still waits
    await one.until(lambda: one.releases)
    assert not one.releases[0].failure and not one.leases
    await two.submit(instance("next"))
    await two.until(lambda: two.puts)
    assert two.puts[0].group.header.instance_id == "next" and two.puts[0].group.header.max_policy_version == 0
    assert not one.puts and "late" not in {name for name, *_ in made.engine.requests}


async def test_a_run_without_rollouts_gets_one_of_two_and_the_last_policy_is_gone_with_it(pool):
    broker, rollout = pool
    one = broker.create("one", member_ttl=QUICK)
    both = [await rollout("one", "two") for _ in range(2)]
    for each in both:
        await works_for(each, "one")
        await each.load(3, run_id="one")
        each.engine.hold(2)
    leaver, stayer = sorted(both, key=lambda each: each.host.instance_id, reverse=True)
    await one.submit(instance("a"), instance("b"), instance("c"))
    direct = generate(leaver)
    await leaver.until(lambda: leaver.service.admission.running == 1)
    await one.until(lambda: len(one.leases) == 3)

    two = broker.create("two", member_ttl=QUICK)
    await works_for(leaver, "two")
    assert "went over to run 'two'" in await refused(direct, grpc.StatusCode.UNAVAILABLE)
    assert leaver.engine.running == 0 and leaver.engine.policy_version == -1
    assert stayer.engine.policy_version == 3 and set(one.members) == {stayer.host.instance_id}
    assert not any(release.failure for release in one.releases)
    await leaver.load(1, run_id="two")
    leaver.engine.let_go()
    await two.submit(instance("d"))
    await two.until(lambda: two.puts)
    assert [put.group.header.instance_id for put in two.puts] == ["d"]
    assert two.puts[0].group.header.max_policy_version == 1


async def test_an_update_that_waited_while_the_rollout_went_over_is_refused(pool):
    broker, rollout = pool
    one = broker.create("one")
    made = await rollout("*")
    await works_for(made, "one")
    made.engine.meet.clear()
    updates, entered = made.service.updates, asyncio.Event()
    wait_joined = updates._wait_joined

    async def wait(request) -> None:
        entered.set()
        await wait_joined(request)

    updates._wait_joined = wait
    await made.join(1, run_id="one")
    begin = asyncio.ensure_future(made.begin(1, run_id="one"))
    await asyncio.wait_for(entered.wait(), 20)
    broker.create("two")
    one.run.state = broker_pb2.RUN_STATE_CANCELLED
    made.service.membership.doubt()
    await works_for(made, "two")
    assert "works for another run now" in await refused(begin, grpc.StatusCode.FAILED_PRECONDITION)
    assert made.engine.policy_version == -1 and made.engine.unpaused.is_set()


async def test_a_run_that_the_engine_cannot_serve_is_left_to_others(pool):
    broker, rollout = pool
    broker.create("masks", sampling_masks=True)
    made = await rollout("*")
    await made.until(lambda: "an active run of '*'" in list(made.host.waiting))
    broker.create("plain")
    await works_for(made, "plain")
    assert not broker.runs["masks"].members and not made.host.stopping.is_set()
