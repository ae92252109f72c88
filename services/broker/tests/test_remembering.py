"""What is settled is remembered for as long as it could be submitted again, in bounded memory."""

import grpc
import pytest
from conftest import serving
from quartet.v1 import broker_pb2 as pb
from world import SERVE, World, group, instance, refused

from quartet_broker import keys


@pytest.fixture
async def world(redis_server, admin):
    """A run that remembers four settled instances; batches of two."""
    async with serving(redis_server.url, remembered_instances=4) as (stub, servicer, _):
        World.number = getattr(World, "number", 0) + 1
        world = World(stub, admin, f"remembering-{World.number}")
        world.store = servicer.store
        await world.create(max_staleness=50)
        await world.open()
        yield world


async def train(world: World, data_pass: int, *names: str) -> None:
    """Submit, generate, train and commit these in batches of two."""
    response = await submit(world, data_pass, *names)
    assert response.accepted == len(names)
    for _ in range(0, len(names), 2):
        await world.roll_out(2, 99)
        step = (await world.run()).policy_version
        await world.train(step)
    await world.commit((await world.run()).policy_version)


async def submit(world: World, data_pass: int, *names: str):
    instances = [instance(name, data_pass=data_pass) for name in names]
    return await world.stub.SubmitPrompts(pb.SubmitPromptsRequest(run_id=world.run_id, instances=instances))


async def remembered(world: World) -> int:
    return await world.redis.hlen(keys.prefix(world.run_id) + "settled")


async def test_a_pass_that_is_over_is_remembered_by_its_number(world):
    await train(world, 0, "a0", "a1", "a2", "a3")
    await train(world, 1, "b0", "b1", "b2", "b3")
    assert await remembered(world) == 4
    assert await world.redis.hget(keys.run(world.run_id), "first_pass") == b"1"
    # The feeder starts again from the beginning: nothing of either pass is accepted again.
    again = await submit(world, 0, "a0", "a3", "never seen")
    assert (again.accepted, again.duplicates) == (0, 3)
    again = await submit(world, 1, "b0", "b3")
    assert (again.accepted, again.duplicates) == (0, 2)
    await refused(world.state_of("a0"), grpc.StatusCode.NOT_FOUND)


async def test_a_pass_that_goes_on_is_remembered_whole(world):
    await submit(world, 0, "a0", "a1", "a2", "a3", "a4", "a5", "late")
    for step in range(3):
        await world.roll_out(2, 99)
        await world.train(step)
    await world.commit(3)
    [late] = await world.lease(1, 99)
    await train(world, 1, "b0", "b1")  # a later pass has begun, but `late` is still to be trained
    assert late.instance.instance_id == "late" and await remembered(world) == 8
    again = await submit(world, 0, "a0")
    assert (again.accepted, again.duplicates) == (0, 1)


async def test_a_dead_prompt_does_not_keep_its_pass_going(world):
    await submit(world, 0, "bad", "a0", "a1", "a2", "a3")
    [lease] = await world.lease(1, 99)
    await world.release(lease.lease_id, "too long", permanent=True)
    for step in range(2):
        await world.roll_out(2, 99)
        await world.train(step)
    await world.commit(2)
    await train(world, 1, "b0", "b1")
    assert await remembered(world) == 4
    assert await world.state_of("bad") == "DEAD"
    # Put back, it is trained like any other, and its pass stays forgotten.
    await world.requeue_dead()
    await submit(world, 1, "b2")
    await world.roll_out(2, 99)
    assert set(await world.batch(3)) == {"bad", "b2"}


async def test_a_pass_without_an_end_is_bounded_all_the_same(world):
    """Beyond twice the limit the oldest go: what a client that never counts its passes can fill is bounded."""
    for n in range(10):
        await train(world, 0, f"x{2 * n}", f"x{2 * n + 1}")
    assert await remembered(world) <= 8
    assert (await submit(world, 0, "x19")).duplicates == 1
    assert (await submit(world, 0, "x0")).accepted == 1


async def test_what_is_not_accepted_leaves_nothing(world):
    """A payload is stored before the script that accepts it: of a refused group nothing stays."""
    await submit(world, 0, "a0", "a1")
    first, second = await world.lease(2, 99)
    await world.put(group(first, 0), group(second, 0))
    before = await stored(world)
    assert len(before) == 4  # payload and transcript of two groups
    assert await world.put(group(first, 0), group(second, 0, size=7)) == ["DUPLICATE", "DUPLICATE"]
    assert await stored(world) == before
    ttls = [await world.redis.ttl(key) for key in before]
    assert ttls == [-1] * 4
    await world.train(0)
    await world.commit(1)
    assert await stored(world) == []


async def test_a_run_that_is_not_there_stores_nothing(world):
    await submit(world, 0, "a0")
    [lease] = await world.lease(1, 99)
    nowhere = World(world.stub, world.redis, world.run_id + "-nowhere")
    await refused(nowhere.put(group(lease, 0)), grpc.StatusCode.NOT_FOUND)
    assert await stored(nowhere) == []


async def test_a_call_with_a_wrong_purpose_is_refused_whole(world):
    await submit(world, 0, "a0", "a1")
    first, second = await world.lease(2, 99)
    wrong = group(second, 0)
    wrong.group.header.purpose = SERVE
    await refused(world.put(group(first, 0), wrong), grpc.StatusCode.INVALID_ARGUMENT, "groups[1].group.header.purpose")
    assert await world.state_of("a0") == "LEASED" and await stored(world) == []
    assert await world.put(group(first, 0), group(second, 0)) == ["ACCEPTED", "ACCEPTED"]


async def stored(world: World) -> list[bytes]:
    prefix = keys.prefix(world.run_id)
    found = [key async for key in world.redis.scan_iter(match=prefix + "payload:*")]
    return sorted(found + [key async for key in world.redis.scan_iter(match=prefix + "transcript:*")])
