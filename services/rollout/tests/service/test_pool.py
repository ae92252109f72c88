"""Rollouts that may work for several runs: one at a time, and nothing of one run reaches another."""

import asyncio

import grpc
import pytest
from doubles import InTestBroker
from google.protobuf.duration_pb2 import Duration
from pydantic import ValidationError
from quartet.v1 import broker_pb2, rollout_pb2
from world import World, instance, neighbors, refused

from quartet_common.errors import not_found
from quartet_rollout.config import RolloutSection

QUICK = Duration(seconds=3)
"""A membership's ttl: a heartbeat a second, and with it a look at the other runs."""


class ManyRuns:
    """A broker of several runs, each the in-test broker's: hands each call to the run that it is about."""

    def __init__(self) -> None:
        self.runs: dict[str, InTestBroker] = {}

    def create(self, run_id: str, **fields) -> InTestBroker:
        made = self.runs[run_id] = InTestBroker()
        made.create_run(run_id=run_id, **fields)
        made.run.created_at.seconds = len(self.runs)
        return made

    async def close(self) -> None:
        for one in self.runs.values():
            await one.close()

    async def ListRuns(self, request, context):  # noqa: N802
        """Return a page of one run; its number is the token."""
        page = int(request.page_token or 0)
        runs = [one.run for one in self.runs.values()]
        return broker_pb2.ListRunsResponse(
            runs=runs[page : page + 1], next_page_token=str(page + 1) if page + 1 < len(runs) else ""
        )

    async def GetRun(self, request, context):  # noqa: N802
        if request.run_id not in self.runs:
            raise not_found("run", request.run_id)
        one = self.runs[request.run_id]
        return broker_pb2.GetRunResponse(run=one.run, members=one.members.values())

    def __getattr__(self, name: str):
        async def call(request, context):
            return await getattr(self.runs[request.run_id], name)(request, context)

        return call


@pytest.fixture
async def pool(tmp_path):
    """A broker of no runs yet; returns it and a maker of rollouts."""
    broker = ManyRuns()
    async with neighbors(tmp_path, broker) as make:

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


def test_more_patterns_than_a_member_has_room_for_are_refused():
    """The broker takes members of at most 4 KiB."""
    assert len(RolloutSection(engine="transformers", runs=["x" * 64] * 32).runs) == 32
    with pytest.raises(ValidationError, match="at most 32 items"):
        RolloutSection(engine="transformers", runs=["x"] * 33)


async def test_an_update_that_waited_while_the_rollout_went_over_is_refused(pool):
    broker, rollout = pool
    one = broker.create("one")
    made = await rollout("*")
    await works_for(made, "one")
    made.engine.meet.clear()
    updates, entered = made.service.updates, asyncio.Event()
    begin_update = updates.begin

    async def begin_and_say(*request) -> None:
        entered.set()
        await begin_update(*request)

    updates.begin = begin_and_say
    await made.join(1, run_id="one")
    begin = asyncio.ensure_future(made.begin(1, run_id="one"))
    await asyncio.wait_for(entered.wait(), 20)
    broker.create("two")
    one.run.state = broker_pb2.RUN_STATE_CANCELLED
    made.service.membership.request_heartbeat()
    await works_for(made, "two")
    assert "works for another run now" in await refused(begin, grpc.StatusCode.FAILED_PRECONDITION)
    assert made.engine.policy_version == -1 and made.engine.unpaused.is_set()
