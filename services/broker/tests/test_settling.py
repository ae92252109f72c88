"""A Redis of an earlier state beside a newer checkpoint: the ledger is settled before anything is trained."""

import grpc
import pytest
from conftest import on_both, serving
from model_reference import ledger_digest
from quartet.v1 import broker_pb2 as pb
from world import World, refused

from quartet_broker import keys

Ledger = list[tuple[int, list[str]]]


async def photograph(world: World) -> dict[bytes, bytes]:
    names = [name async for name in world.redis.scan_iter(match=keys.prefix(world.run_id) + "*")]
    return {name: await world.redis.dump(name) for name in names}


async def put_back(world: World, picture: dict[bytes, bytes]) -> None:
    """Have Redis be as it was at the photograph."""
    await world.redis.delete(*[name async for name in world.redis.scan_iter(match=keys.prefix(world.run_id) + "*")])
    for name, value in picture.items():
        await world.redis.restore(name, 0, value)


async def steps(world: World, ledger: Ledger, number: int, durable: bool = True) -> None:
    """Train some steps more."""
    for _ in range(number):
        step = len(ledger)
        await world.roll_out(2, step)
        batch = await world.batch(step)
        await world.trained(step, ids=batch)
        ledger.append((step, batch))
    if durable:
        await world.commit(len(ledger))


@pytest.fixture
async def behind(world):
    """A run whose books end at step 1, its trainer's checkpoint at step 4; `ledger` is the checkpoint's."""
    await world.create(max_staleness=9)
    await world.submit(*(f"p{n}" for n in range(10)))
    await world.open()
    world.ledger = []
    await steps(world, world.ledger, 1)
    picture = await photograph(world)
    await steps(world, world.ledger, 3)
    await put_back(world, picture)
    return world


@on_both
async def test_what_the_books_lack_is_settled_before_the_first_lease(behind):
    opened = await behind.open(checkpoint=4, settles_ledger=True)
    assert opened.settle_from_step == 1 and opened.run.policy_version == 4
    assert opened.ledger_digest == ledger_digest([ids for _, ids in behind.ledger[:1]])
    for call in (behind.take(4), behind.trained(4), behind.commit(4), behind.drop(4, "p0")):
        assert "books end at step 1, the checkpoint has 4" in await refused(call)
    assert "next step to be settled is 1" in await refused(behind.settle(*behind.ledger[2:]))
    assert (await behind.settle(*behind.ledger[1:3])).settled_steps == 3
    assert "books end at step 3, the checkpoint has 4" in await refused(behind.take(4))
    assert [fault for fault in await behind.faults() if "settled up to step 3 of 4" in fault]

    # The broker, Redis or the trainer falls: another session goes on where this one was, and may repeat itself.
    assert (await behind.open(checkpoint=4, settles_ledger=True)).settle_from_step == 3
    request = pb.FinishRunRequest(run_id=behind.run_id, state=pb.RUN_STATE_SUCCEEDED, committed_step=4)
    assert "books end at step 3, and it ends at step 4" in await refused(behind.stub.FinishRun(request))
    answer = await behind.settle(*behind.ledger)
    assert (answer.settled_steps, answer.settled) == (4, 2)
    await behind.roll_out(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]
    assert (await behind.stats()).committed == 8 and not await behind.faults()
    assert (await behind.stub.FinishRun(request)).run.state == pb.RUN_STATE_SUCCEEDED


async def test_a_trainer_without_a_ledger_is_refused_unless_its_ids_reach_back_to_the_books(behind):
    told = await refused(behind.open(checkpoint=4, consumed=behind.ledger[2][1] + behind.ledger[3][1]))
    assert "lack the steps 1 to 1" in told and "settles_ledger" in told
    await behind.open(checkpoint=4, consumed=[name for _, ids in behind.ledger[1:] for name in ids])
    await behind.roll_out(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]


async def test_who_feeds_is_told_that_the_broker_forgot(world):
    await world.create()
    picture = await photograph(world)
    await world.submit("a", "b")
    await put_back(world, picture)
    await refused(world.submit("c", follows="b"), grpc.StatusCode.ABORTED, "from the first prompt")
    assert (await world.stats()).submitted == 0
    assert (await world.submit("a", "b")).accepted == 2
    assert (await world.submit("c", follows="b")).accepted == 1


async def test_what_only_the_ledger_knows_is_remembered_until_it_is_submitted_again(redis_server, admin):
    """Its data pass is not known: it is not forgotten for that, and the memory is bounded all the same."""
    async with serving(redis_server.url, remembered_instances=4) as (stub, _, _):
        world = World(stub, admin, "settled-passes")
        await world.create(max_staleness=50)
        await world.open()
        picture = await photograph(world)
        ledger: Ledger = []
        passes = [[f"{data_pass}/{n}" for n in range(6)] for data_pass in range(4)]
        for data_pass, names in enumerate(passes):
            await world.submit(*names, data_pass=data_pass)
            await steps(world, ledger, 3)
        over = await world.call("Commit", session_epoch=world.session, step=12)
        assert over.first_remembered_pass == 3
        await put_back(world, picture)

        await world.open(checkpoint=12, settles_ledger=True, first_remembered_pass=over.first_remembered_pass)
        await world.settle(*ledger)
        assert await admin.hlen(keys.prefix(world.run_id) + "settled") <= 12
        for data_pass, names in enumerate(passes):
            again = await world.submit(*names, data_pass=data_pass)
            assert (again.accepted, again.duplicates) == (0, 6), data_pass
        await world.submit("4/0", "4/1", data_pass=4)
        await steps(world, ledger, 1)
        assert await admin.hlen(keys.prefix(world.run_id) + "settled") <= 8
        assert (await world.submit("3/0", data_pass=3)).duplicates == 1 and not await world.faults()
