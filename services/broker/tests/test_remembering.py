"""What is settled is remembered for as long as it could be submitted again, in bounded memory."""

import math

import grpc
import pytest
from world import SERVE, World, group, refused

from quartet_broker import keys

pytestmark = pytest.mark.broker(remembered_instances=4)


@pytest.fixture
async def world(world):
    """A run that remembers four settled instances; batches of two."""
    await world.create(max_staleness=50)
    await world.open()
    return world


async def train(world: World, data_pass: int, *names: str) -> None:
    """Submit, generate, train and commit these in batches of two."""
    response = await world.submit(*names, data_pass=data_pass)
    assert response.accepted == len(names)
    for _ in range(0, len(names), 2):
        await world.generate(2, 99)
        step = (await world.run()).policy_version
        await world.train(step)
    await world.commit((await world.run()).policy_version)


async def remembered(world: World) -> int:
    return await world.redis.hlen(keys.prefix(world.run_id) + "settled")


async def test_a_pass_that_is_over_is_remembered_by_its_number(world):
    await train(world, 0, "a0", "a1", "a2", "a3")
    await train(world, 1, "b0", "b1", "b2", "b3")
    assert await remembered(world) == 4
    assert (await world.call("Commit", session_epoch=world.session, step=4)).first_remembered_pass == 1
    # The feeder starts again from the beginning: nothing of either pass is accepted again.
    again = await world.submit("a0", "a3", "never seen", data_pass=0)
    assert (again.accepted, again.duplicates) == (0, 3)
    again = await world.submit("b0", "b3", data_pass=1)
    assert (again.accepted, again.duplicates) == (0, 2)
    await refused(world.state_of("a0"), grpc.StatusCode.NOT_FOUND)


async def test_a_pass_that_goes_on_is_remembered_whole(world):
    await world.submit("a0", "a1", "a2", "a3", "a4", "a5", "late", data_pass=0)
    for step in range(3):
        await world.generate(2, 99)
        await world.train(step)
    await world.commit(3)
    [late] = await world.lease(1, 99)
    await train(world, 1, "b0", "b1")  # a later pass has begun, but `late` is still to be trained
    assert late.instance.instance_id == "late" and await remembered(world) == 8
    again = await world.submit("a0", data_pass=0)
    assert (again.accepted, again.duplicates) == (0, 1)


async def test_a_pass_without_an_end_is_bounded_all_the_same(world):
    """Beyond twice the limit the oldest go: what a client that never counts its passes can fill is bounded."""
    for n in range(10):
        await train(world, 0, f"x{2 * n}", f"x{2 * n + 1}")
    assert await remembered(world) <= 8
    assert (await world.submit("x19", data_pass=0)).duplicates == 1
    assert (await world.submit("x0", data_pass=0)).accepted == 1


async def test_what_is_refused_stores_nothing(world):
    """A payload is stored before the script that accepts it; a call with one wrong group is refused whole."""
    await world.submit("a0", "a1", data_pass=0)
    first, second = await world.lease(2, 99)
    wrong = group(second, 0)
    wrong.group.header.purpose = SERVE
    await refused(world.put(group(first, 0), wrong), grpc.StatusCode.INVALID_ARGUMENT, "groups[1].group.header.purpose")
    endless = group(second, 0)
    endless.group.header.verifiers.add(name="close", reward=math.inf)
    field = "groups[0].group.header.verifiers[0].reward"
    await refused(world.put(endless), grpc.StatusCode.INVALID_ARGUMENT, field)
    stored = [key async for key in world.redis.scan_iter(match=keys.prefix(world.run_id) + "payload:*")]
    assert await world.state_of("a0") == "LEASED" and stored == []
    assert await world.put(group(first, 0), group(second, 0)) == ["ACCEPTED", "ACCEPTED"]
