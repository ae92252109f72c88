"""The curriculum: prompts that are solved or hopeless are dropped when they would be leased, and counted."""

import asyncio
import hashlib

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from world import TRAIN, World, group, instance, refused

ALWAYS = {"window": 2, "solved_above": 0.9, "hopeless_below": 0.1, "floor": 0.0}


async def use(world: World, data_pass: int, **problems: str) -> pb.SubmitPromptsResponse:
    """Submit an instance of each problem, of the source that is given."""
    instances = []
    for problem, source in problems.items():
        one = instance(f"pass-{data_pass}/{problem}", purpose=TRAIN, data_pass=data_pass, source=source)
        one.prompt.prompt_id = problem
        instances.append(one)
    return await world.call("SubmitPrompts", instances=instances)


async def answer(world: World, version: int = 0, **accuracies: float) -> list[str]:
    """Lease what there is and put groups with the accuracy of each problem; return the ids."""
    leases = await world.lease(version=version)
    puts = []
    for lease in leases:
        puts.append(group(lease, version))
        puts[-1].group.header.ans_acc = accuracies[lease.instance.prompt.prompt_id]
    if puts:
        assert set(await world.put(*puts)) == {"ACCEPTED"}
    return [lease.instance.instance_id for lease in leases]


async def create(world: World, **curriculum) -> None:
    await world.create(groups_per_step=100, curriculum=pb.Curriculum(**ALWAYS | curriculum))


PROBLEMS = {"easy": "a", "fair": "a", "hard": "b"}
ACCURACIES = {"easy": 1.0, "fair": 0.5, "hard": 0.0}


async def test_solved_and_hopeless_prompts_are_dropped_after_a_full_window(world):
    await create(world)
    used = []
    for data_pass in range(3):
        await use(world, data_pass, **PROBLEMS)
        used.append(await answer(world, **ACCURACIES))
    assert [len(each) for each in used] == [3, 3, 1] and used[2] == ["pass-2/fair"]
    run = await world.run()
    assert (run.stats.skipped, run.stats.dropped, run.stats.queued, run.stats.ready) == (2, 2, 0, 7)
    told = {each.name: (each.used, each.solved, each.hopeless, each.groups, each.accuracy) for each in run.sources}
    assert told == {"a": (5, 1, 0, 5, pytest.approx(0.7)), "b": (2, 0, 1, 2, 0.0)}
    assert await world.state_of("pass-2/easy") == "DROPPED"
    reason = (await world.call("GetGroup", instance_id="pass-2/hard")).moments[-1].reason
    assert reason == "the curriculum skips it: accuracy below 0.1 over its last 2 groups"
    await refused(_result(world, "pass-2/easy"), grpc.StatusCode.NOT_FOUND, "its prompt was skipped")
    assert (await use(world, 2, **PROBLEMS)).duplicates == 3  # a feeder that starts again changes nothing
    assert await world.faults() == []


async def _result(world: World, name: str) -> None:
    async for _ in world.call("CollectResults", instance_ids=[name]):
        pass


async def test_a_source_is_followed_as_a_whole(world):
    await create(world, by=pb.CURRICULUM_UNIT_SOURCE)
    await use(world, 0, easy="a", fair="a", hard="b")
    await answer(world, easy=1.0, fair=1.0, hard=0.0)
    await use(world, 0, other="a", another="b")
    assert await answer(world, another=0.0) == ["pass-0/another"]


async def test_the_floor_uses_a_share_that_depends_on_the_instance_alone(world):
    await create(world, window=1, floor=0.25)
    await use(world, 0, easy="")
    await answer(world, easy=1.0)
    for data_pass in range(1, 201):
        await use(world, data_pass, easy="")
    used = await answer(world, easy=1.0)
    assert 30 <= len(used) <= 70 and (await world.stats()).skipped == 200 - len(used)
    assert not (await world.run()).sources  # the data have one source, without a name
    coins = {f"pass-{n}/easy": hashlib.sha1(f"pass-{n}/easy".encode()).hexdigest() for n in range(1, 201)}
    assert used == [name for name, digest in coins.items() if int(digest[:8], 16) < 0.25 * 2**32]


async def test_unjudged_groups_and_prompts_without_id_are_not_followed(world):
    await create(world, window=1)
    for data_pass in range(3):
        one = instance(f"pass-{data_pass}/x", data_pass=data_pass)
        one.prompt.ClearField("prompt_id")
        await world.call("SubmitPrompts", instances=[one])
        await use(world, data_pass, silent="")
        leases = await world.lease()
        assert len(leases) == 2
        puts = [group(lease) for lease in leases]
        puts[1].group.header.unjudged = puts[1].group.header.completions
        await world.put(*puts)
    assert (await world.stats()).skipped == 0


async def test_a_prompt_generated_again_counts_once(world):
    """Newer groups overtake its group, which is then too old."""
    order = pb.LEASE_ORDER_FRESH_FIRST
    await world.create(groups_per_step=1, max_staleness=1, lease_order=order, curriculum=pb.Curriculum(**ALWAYS))
    await world.open()
    await use(world, 0, fair="", easy="")
    await answer(world, **ACCURACIES)
    await world.train(0)
    await use(world, 0, hard="")
    await answer(world, version=1, **ACCURACIES)
    assert await world.train(1) == ["pass-0/hard"]
    await world.take(2)
    assert await answer(world, version=2, **ACCURACIES) == ["pass-0/easy"]
    assert await world.redis.hget(f"q:{{{world.run_id}}}:solves", "\neasy") == b"1"


async def test_data_of_which_all_is_skipped_end_at_once_for_a_waiting_trainer(world):
    """More than one call drops; the rollout that waits is not left waiting, nor is the trainer."""
    await create(world, window=1)
    await use(world, 0, easy="")
    await answer(world, easy=1.0)
    for data_pass in range(1, 8):
        await world.call("SubmitPrompts", instances=[_again(data_pass, n) for n in range(200)])
    await world.end_prompts()
    await world.open()
    waiting = asyncio.create_task(world.take(0, wait=20))
    async with asyncio.timeout(15):
        asking = asyncio.create_task(world.ask(wait=20))
        manifest, _ = await waiting
        assert manifest.end_of_data
        stats = await world.stats()
        assert (stats.skipped, stats.queued, stats.ready) == (1400, 0, 0)
        await world.finish()
        assert not (await asking).leases
    assert await world.faults() == []


def _again(data_pass: int, n: int):
    one = instance(f"pass-{data_pass}/{n}", data_pass=data_pass)
    one.prompt.prompt_id = "easy"
    return one


async def test_a_run_without_curriculum_keeps_no_accuracies(world):
    await world.create()
    await use(world, 0, easy="a")
    await answer(world, easy=1.0)
    assert not await world.redis.exists(f"q:{{{world.run_id}}}:solves")
    assert [(each.name, each.used, each.accuracy) for each in (await world.run()).sources] == [("a", 1, 1.0)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window": 65}, "spec.curriculum.window: got 65; allowed: 1 to 64"),
        ({"solved_above": 1.5}, "spec.curriculum.solved_above: got 1.5; allowed: 0 to 1"),
        ({"hopeless_below": 0.95}, "spec.curriculum.hopeless_below: got 0.95; allowed: 0 to solved_above"),
        ({"floor": 1.0}, "spec.curriculum.floor: got 1.0; allowed: 0 to 1, without 1"),
        ({"floor": float("nan")}, "spec.curriculum.floor: got nan"),
        ({"by": 7}, "spec.curriculum.by: got 7; allowed: CURRICULUM_UNIT_PROMPT, CURRICULUM_UNIT_SOURCE"),
    ],
)
async def test_a_curriculum_that_cannot_be_is_refused(world, wrong, words):
    await refused(create(world, **wrong), grpc.StatusCode.INVALID_ARGUMENT, words)


async def test_the_defaults_are_the_run_files(world):
    run = await world.create(curriculum=pb.Curriculum())
    one = run.spec.curriculum
    assert (one.by, one.window, one.solved_above, one.hopeless_below, one.floor) == (1, 2, 0.99, 0.01, 0.1)
