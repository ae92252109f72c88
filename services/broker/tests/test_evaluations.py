"""Evaluations: stored sets, pinned versions, priority, completeness."""

import asyncio

import grpc
from conftest import on_both, serving
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from world import EVALUATE, World, group, refused

from quartet_broker import keys
from quartet_common.durations import to_duration

pytestmark = on_both


async def get(world, evaluation_id: str, wait: float = 0, **more) -> pb.GetEvaluationResponse:
    return await world.call("GetEvaluation", evaluation_id=evaluation_id, wait=to_duration(wait), **more)


async def test_who_waits_for_an_evaluation_has_it_with_the_last_group(world):
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(3)
    leases = await world.lease(version=3)
    assert leases[0].instance.evaluation_id == "heldout@3" and leases[0].instance.pinned_version == 3
    assert await world.put(group(leases[0], 3)) == ["ACCEPTED"]
    waiting = asyncio.create_task(get(world, "heldout@3", wait=20))
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.put(group(leases[1], 3))
    whole = await waiting
    assert whole.complete and [header.instance_id for header in whole.headers] == ["e1@3", "e2@3"]
    transcripts = [experience_pb2.GroupTranscript.FromString(transcript) for transcript in whole.transcripts]
    assert [transcript.instance.prompt.prompt_id for transcript in transcripts] == ["e1", "e2"]
    assert not (await get(world, "heldout@3", summary_only=True)).transcripts


async def test_an_evaluation_of_the_live_policy_is_drawn_at_whatever_version_there_is(world):
    """In a fast run weights change between the leases, and between two tokens: nothing is pinned to what has passed."""
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    for _ in range(2):
        started = await world.call("StartEvaluation", evaluation_set="heldout", live="a-look")
        assert (started.evaluation_id, started.prompts) == ("heldout@live-a-look", 2)
    (first,) = await world.lease(1, version=4)
    (second,) = await world.lease(1, version=7)
    assert not first.instance.HasField("pinned_version")
    await world.release(second.lease_id)
    (second,) = await world.lease(1, version=8)
    assert second.instance.instance_id == "e2@live-a-look"
    assert await world.put(group(first, 5), group(second, 9)) == ["ACCEPTED", "ACCEPTED"]
    whole = await get(world, "heldout@live-a-look")
    assert whole.complete and [header.min_policy_version for header in whole.headers] == [5, 9]
    malformed = world.call("StartEvaluation", evaluation_set="heldout", live="a look")
    await refused(malformed, grpc.StatusCode.INVALID_ARGUMENT, "live")


async def test_dead_prompts_complete_an_evaluation(world):
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(0)
    first, second = await world.lease()
    await world.put(group(first))
    waiting = asyncio.create_task(get(world, "heldout@0", wait=20))
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.release(second.lease_id, "bad reference", permanent=True)
    result = await waiting
    assert (result.complete, result.finished, result.dead) == (True, 1, 1)
    await world.requeue_dead()
    assert not (await get(world, "heldout@0")).complete
    (lease,) = await world.lease()
    await world.put(group(lease))
    assert (await get(world, "heldout@0")).finished == 2


async def test_the_oldest_complete_evaluations_are_let_go(redis_server, admin):
    async with serving(redis_server.url, max_evaluation_bytes=700) as (stub, _, _):
        world = World(stub, admin, "evaluated")
        await world.create(max_deliveries=1)
        await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
        await world.start_evaluation(0)  # nobody answers it
        prefix = keys.prefix(world.run_id)
        for version in range(1, 6):
            await world.start_evaluation(version)
            first, second = await world.lease(version=version)
            if version == 1:
                await world.release(first.lease_id, "broken", permanent=True)
            else:
                assert await world.put(group(first, version)) == ["ACCEPTED"]
            assert await world.put(group(second, version)) == ["ACCEPTED"]
            assert (await get(world, f"heldout@{version}", summary_only=True)).complete
        kept = [name.decode() for name in await admin.lrange(prefix + "evaluations", 0, -1)]
        assert kept[0] == "heldout@0" and kept[-1] == "heldout@5" and "heldout@1" not in kept and len(kept) < 5
        assert {key.decode() for key in await admin.keys(prefix + "evaluation:*:headers")} == {
            f"{prefix}evaluation:{name}:headers" for name in kept[1:]
        }
        await refused(get(world, "heldout@1"), grpc.StatusCode.NOT_FOUND, "max_evaluation_bytes")
        # What is left of it, a dead prompt, can be requeued; it counts for no evaluation.
        await world.requeue_dead()
        (again,) = await world.lease(version=1)
        assert await world.put(group(again, 1)) == ["ACCEPTED"]
        assert not await admin.exists(prefix + "evaluation:heldout@1")
        held = [int(await admin.hget(f"{prefix}evaluation:{name}", "bytes") or 0) for name in kept]
        assert int(await admin.hget(prefix + "stats", "evaluation_bytes")) == sum(held) <= 700 + 2 * max(held)
