"""Books that end before the checkpoint: the ledger is settled before anything is trained."""

import grpc
import pytest
from conftest import on_both
from model_reference import ledger_digest
from quartet.v1 import broker_pb2 as pb
from world import refused

from quartet_broker import keys


def ledger_of(steps: int) -> list[tuple[int, list[str]]]:
    """What a checkpoint says of its steps: two groups each."""
    return [(step, [f"p{2 * step}", f"p{2 * step + 1}"]) for step in range(steps)]


LEDGER = ledger_of(4)


@pytest.fixture
async def behind(world):
    """A run whose books end at step 1, as those of a Redis of an earlier state; the trainer's checkpoint at step 4."""
    await world.create(max_staleness=9)
    await world.submit(*(f"p{n}" for n in range(10)))
    await world.open()
    await world.generate(2)
    assert await world.train(0) == LEDGER[0][1]
    await world.commit(1)
    return world


@on_both
async def test_what_the_books_lack_is_settled_before_the_first_lease(behind):
    opened = await behind.open(checkpoint=4, settles_ledger=True)
    assert opened.settle_from_step == 1 and opened.run.policy_version == 4
    assert opened.ledger_digest == ledger_digest([ids for _, ids in LEDGER[:1]])
    for call in (behind.take(4), behind.trained(4), behind.commit(4), behind.drop(4, "p0")):
        assert "books end at step 1, the checkpoint has 4" in await refused(call)
    assert "next step to be settled is 1" in await refused(behind.settle(*LEDGER[2:]))
    assert (await behind.settle(*LEDGER[1:3])).settled_steps == 3
    assert "books end at step 3, the checkpoint has 4" in await refused(behind.take(4))
    assert [fault for fault in await behind.faults() if "settled up to step 3 of 4" in fault]

    # The broker, Redis or the trainer falls: another session goes on where this one was, and may repeat itself.
    assert (await behind.open(checkpoint=4, settles_ledger=True)).settle_from_step == 3
    request = pb.FinishRunRequest(run_id=behind.run_id, state=pb.RUN_STATE_SUCCEEDED, committed_step=4)
    assert "books end at step 3, and it ends at step 4" in await refused(behind.stub.FinishRun(request))
    answer = await behind.settle(*LEDGER)
    assert (answer.settled_steps, answer.settled) == (4, 2)
    await behind.generate(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]
    assert (await behind.stats()).committed == 8 and not await behind.faults()
    assert (await behind.stub.FinishRun(request)).run.state == pb.RUN_STATE_SUCCEEDED


async def test_what_the_ledger_says_was_trained_may_be_anywhere_in_the_books(world):
    """p0 is dropped, p1 in a batch, p2 and p3 are ready, p4 is dead, p5 leased, the others are queued."""
    await world.create(max_staleness=9)
    await world.submit(*(f"p{n}" for n in range(8)))
    await world.open()
    await world.generate(4)
    await world.batch(0)
    await world.drop(0, "p0")
    dead, _ = await world.lease(2)
    await world.release(dead.lease_id, "no", permanent=True)
    await world.open(checkpoint=4, settles_ledger=True)
    assert (await world.settle(*LEDGER)).settled == 8
    stats = await world.stats()
    assert (stats.committed, stats.dropped, stats.dead, stats.leased, stats.queued) == (8, 0, 0, 0, 0)
    assert not await world.faults()


async def test_a_session_that_the_books_have_lost_fences_the_one_that_it_replaced(world):
    await world.create()
    await world.open()
    before = world.session - 1000
    await world.redis.hset(keys.run(world.run_id), "session", before)
    for session in (world.session, before):
        await refused(world.commit(0, session=session), grpc.StatusCode.FAILED_PRECONDITION, "fenced")


async def test_a_trainer_without_a_ledger_is_refused_unless_its_ids_reach_back_to_the_books(behind):
    told = await refused(behind.open(checkpoint=4, consumed=LEDGER[2][1] + LEDGER[3][1]))
    assert "lack the steps 1 to 1" in told and "settles_ledger" in told
    await behind.open(checkpoint=4, consumed=[name for _, ids in LEDGER[1:] for name in ids])
    await behind.generate(version=4)
    assert sorted(await behind.batch(4)) == ["p8", "p9"]


async def test_who_feeds_is_told_that_the_broker_forgot(world):
    await world.create()
    await refused(world.submit("c", follows="b"), grpc.StatusCode.ABORTED, "from the first prompt")
    assert (await world.stats()).submitted == 0
    assert (await world.submit("a", "b")).accepted == 2
    assert (await world.submit("c", follows="b")).accepted == 1


@pytest.mark.broker(remembered_instances=4)
async def test_what_only_the_ledger_knows_is_remembered_until_it_is_submitted_again(world):
    """Its data pass is not known: it is not forgotten for that, and the memory is bounded all the same."""
    await world.create(max_staleness=50)
    passes = [[f"p{6 * data_pass + n}" for n in range(6)] for data_pass in range(4)]
    await world.open(checkpoint=12, settles_ledger=True, first_remembered_pass=3)
    await world.settle(*ledger_of(12))

    async def remembered() -> int:
        return await world.redis.hlen(keys.prefix(world.run_id) + "settled")

    assert await remembered() <= 12
    for data_pass, names in enumerate(passes):
        again = await world.submit(*names, data_pass=data_pass)
        assert (again.accepted, again.duplicates) == (0, 6), data_pass
    await world.submit("next-0", "next-1", data_pass=4)
    await world.generate(2, 12)
    await world.train(12)
    await world.commit(13)
    assert await remembered() <= 8
    assert (await world.submit("p18", data_pass=3)).duplicates == 1 and not await world.faults()
