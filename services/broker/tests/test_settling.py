"""A Redis of an earlier state beside a newer checkpoint: the ledger is settled before anything is trained."""

import hashlib

import grpc
import pytest
from conftest import on_both, serving
from quartet.v1 import broker_pb2 as pb
from world import World, group, instance, refused

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


async def settle(world: World, lines: Ledger) -> pb.SettleTrainedResponse:
    lines_sent = [pb.TrainedStep(step=step, instance_ids=ids) for step, ids in lines]
    request = pb.SettleTrainedRequest(run_id=world.run_id, session_epoch=world.session, steps=lines_sent)
    return await world.stub.SettleTrained(request)


def digest_of(ledger: Ledger) -> str:
    digest = ""
    for _, ids in ledger:
        digest = hashlib.sha1("\n".join([digest, *ids]).encode()).hexdigest()
    return digest


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
    for call in (behind.take(4), behind.trained(4), behind.commit(4), behind.drop(4, "p0")):
        assert "books end at step 1, the checkpoint has 4" in await refused(call)
    assert (await settle(behind, behind.ledger[1:3])).settled_steps == 3
    assert "books end at step 3, the checkpoint has 4" in await refused(behind.take(4))
    assert [fault for fault in await behind.faults() if "settled up to step 3 of 4" in fault]

    # The broker, Redis or the trainer falls: another session goes on where this one was, and may repeat itself.
    assert (await behind.open(checkpoint=4, settles_ledger=True)).settle_from_step == 3
    answer = await settle(behind, behind.ledger)
    assert (answer.settled_steps, answer.settled) == (4, 2)
    await behind.roll_out(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]
    assert (await behind.stats()).committed == 8 and not await behind.faults()


async def test_the_lines_come_without_a_gap_and_not_beyond_the_checkpoint(behind):
    await behind.open(checkpoint=4, settles_ledger=True)
    assert "next step to be settled is 1" in await refused(settle(behind, behind.ledger[2:]))
    await refused(
        settle(behind, [behind.ledger[1], behind.ledger[3]]), grpc.StatusCode.INVALID_ARGUMENT, "steps[1].step"
    )
    await settle(behind, behind.ledger)
    assert "4 steps" in await refused(settle(behind, [(4, ["p9"])]))
    assert await behind.state_of("p9") != "COMMITTED"


async def test_a_trainer_without_a_ledger_is_refused_unless_its_ids_reach_back_to_the_books(behind):
    told = await refused(behind.open(checkpoint=4, consumed=behind.ledger[2][1] + behind.ledger[3][1]))
    assert "lack the steps 1 to 1" in told and "settles_ledger" in told
    await behind.open(checkpoint=4, consumed=[name for _, ids in behind.ledger[1:] for name in ids])
    await behind.roll_out(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]


async def test_the_books_have_a_digest_of_what_is_committed(behind):
    opened = await behind.open(checkpoint=4, settles_ledger=True)
    assert opened.ledger_digest == digest_of(behind.ledger[:1])
    await settle(behind, behind.ledger[1:])
    await steps(behind, behind.ledger, 1)
    assert (await behind.open(checkpoint=5, settles_ledger=True)).ledger_digest == digest_of(behind.ledger)


async def test_a_batch_of_a_history_that_was_given_up_goes_back_to_the_queue(world):
    """Redis is at a state in which step 1 was trained with other groups than the checkpoint has."""
    await world.create(max_staleness=9)
    await world.submit("p0", "p1")
    await world.open()
    ledger: Ledger = []
    await steps(world, ledger, 1)
    before = await photograph(world)
    await world.submit("x", "y", "p2", "p3")
    await world.roll_out(2, 1)
    assert await world.batch(1) == ["x", "y"]
    await world.trained(1)
    await world.roll_out(2, 1)
    assert await world.batch(2) == ["p2", "p3"]
    await world.drop(2, "p2")
    given_up = await photograph(world)

    await put_back(world, before)
    await world.open(checkpoint=1, settles_ledger=True)
    await world.submit("p2", "p3")
    await steps(world, ledger, 1)
    await put_back(world, given_up)
    await world.open(checkpoint=2, settles_ledger=True)
    await settle(world, ledger[1:])
    assert [await world.state_of(name) for name in ("p2", "p3", "x", "y")] == ["COMMITTED"] * 2 + ["QUEUED"] * 2
    stats = await world.stats()
    assert (stats.committed, stats.dropped, stats.queued) == (4, 0, 2) and not await world.faults()


async def test_the_trainer_that_lives_cannot_mark_another_batch_than_it_trained(world):
    """Its session is in the restored state too, and so is the step's batch, as it was before a group was dropped."""
    await world.create(max_staleness=9)
    await world.submit(*"abc")
    await world.open()
    await world.roll_out(2)
    assert await world.batch(0) == ["a", "b"]
    picture = await photograph(world)
    await world.drop(0, "a")
    await world.roll_out()
    assert await world.batch(0) == ["b", "c"]
    await put_back(world, picture)
    assert "another batch" in await refused(world.trained(0, ids=["b", "c"]))
    assert await world.trained(0, ids=["a", "b"]) == 1


async def test_a_run_is_not_ended_in_books_that_end_before_it(behind):
    request = pb.FinishRunRequest(run_id=behind.run_id, state=pb.RUN_STATE_SUCCEEDED, committed_step=4)
    assert "books end at step 1, and it ends at step 4" in await refused(behind.stub.FinishRun(request))
    await behind.open(checkpoint=4, settles_ledger=True)
    await settle(behind, behind.ledger)
    assert (await behind.stub.FinishRun(request)).run.state == pb.RUN_STATE_SUCCEEDED


async def test_a_session_that_redis_forgot_fences_the_one_that_it_knows(world):
    await world.create()
    await world.submit(*"ab")
    old = (await world.open()).session_epoch
    await world.roll_out()
    picture = await photograph(world)
    newer = (await world.open()).session_epoch
    await put_back(world, picture)
    assert "fenced" in await refused(world.take(0, session=newer))
    assert "fenced" in await refused(world.take(0, session=old))


async def test_who_feeds_is_told_that_the_broker_forgot(world):
    await world.create()
    picture = await photograph(world)
    await world.submit("a", "b")
    await put_back(world, picture)
    await refused(feed(world, 0, "c", follows="b"), grpc.StatusCode.ABORTED, "from the first prompt")
    assert (await world.stats()).submitted == 0
    assert (await feed(world, 0, "a", "b")).accepted == 2
    assert (await feed(world, 0, "c", follows="b")).accepted == 1


async def feed(world: World, data_pass: int, *names: str, follows: str = "") -> pb.SubmitPromptsResponse:
    instances = [instance(name, data_pass=data_pass) for name in names]
    request = pb.SubmitPromptsRequest(run_id=world.run_id, instances=instances, follows_instance_id=follows)
    return await world.stub.SubmitPrompts(request)


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
            await feed(world, data_pass, *names)
            await steps(world, ledger, 3)
        over = await world.stub.Commit(pb.CommitRequest(run_id=world.run_id, session_epoch=world.session, step=12))
        assert over.first_remembered_pass == 3
        await put_back(world, picture)

        await world.open(checkpoint=12, settles_ledger=True, first_remembered_pass=over.first_remembered_pass)
        await settle(world, ledger)
        assert await admin.hlen(keys.prefix(world.run_id) + "settled") <= 12
        for data_pass, names in enumerate(passes):
            again = await feed(world, data_pass, *names)
            assert (again.accepted, again.duplicates) == (0, 6), data_pass
        assert (await feed(world, 3, "3/6", "3/7")).accepted == 2
        await steps(world, ledger, 1)
        await feed(world, 4, "4/0", "4/1")
        await steps(world, ledger, 1)
        assert await admin.hlen(keys.prefix(world.run_id) + "settled") <= 8
        assert (await feed(world, 3, "3/0")).duplicates == 1 and not await world.faults()
        await refused(
            stub.SubmitPrompts(
                pb.SubmitPromptsRequest(run_id=world.run_id, instances=[instance("4/0", "other", data_pass=4)])
            ),
            grpc.StatusCode.ALREADY_EXISTS,
        )


async def test_a_late_holder_puts_nothing_that_is_settled(behind):
    (late,) = await behind.lease(1, 1)
    await behind.open(checkpoint=4, settles_ledger=True)
    await settle(behind, behind.ledger[1:])
    assert await behind.put(group(late, 4)) == ["DUPLICATE"]
