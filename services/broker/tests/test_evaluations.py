"""Evaluations: stored sets, pinned versions, priority, completeness."""

import asyncio

import grpc
import pytest
from conftest import on_both
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from world import EVALUATE, group, refused

from quartet_broker import keys
from quartet_common.durations import to_duration

pytestmark = on_both


async def get(world, evaluation_id: str, wait: float = 0, **more) -> pb.GetEvaluationResponse:
    return await world.call("GetEvaluation", evaluation_id=evaluation_id, wait=to_duration(wait), **more)


async def test_who_waits_for_an_evaluation_has_it_with_the_last_group_or_the_last_death(world):
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(3)
    first, second = await world.lease(version=3)
    assert first.instance.evaluation_id == "heldout@3" and first.instance.pinned_version == 3
    assert await world.put(group(first, 3)) == ["ACCEPTED"]
    waiting = asyncio.create_task(get(world, "heldout@3", wait=20))
    await world.release(second.lease_id, "bad reference", permanent=True)
    result = await waiting
    assert (result.complete, result.finished, result.dead) == (True, 1, 1)
    await world.requeue_dead()
    waiting = asyncio.create_task(get(world, "heldout@3", wait=20))
    (second,) = await world.lease(version=3)
    await world.put(group(second, 3))
    whole = await waiting
    assert whole.complete and [header.instance_id for header in whole.headers] == ["e1@3", "e2@3"]
    transcripts = [experience_pb2.GroupTranscript.FromString(transcript) for transcript in whole.transcripts]
    assert [transcript.instance.prompt.prompt_id for transcript in transcripts] == ["e1", "e2"]
    assert not (await get(world, "heldout@3", summary_only=True)).transcripts
    await refused(get(world, "heldout@3:finished"), grpc.StatusCode.INVALID_ARGUMENT, "evaluation_id")


async def test_an_evaluation_of_the_live_policy_is_drawn_at_whatever_version_there_is(world):
    """In a fast run weights change between the leases, and between two tokens: nothing is pinned to what has passed."""
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    for _ in range(2):
        started = await world.call("StartEvaluation", evaluation_set="heldout", live="a-look", policy_version=-1)
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


@pytest.mark.broker(max_evaluation_bytes=700)
async def test_the_oldest_complete_evaluations_are_let_go(world, admin):
    await world.create()
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(0)  # nobody answers it
    prefix = keys.prefix(world.run_id)
    for version in range(1, 6):
        await world.start_evaluation(version)
        assert len(await world.generate(version=version)) == 2
    kept = [name.decode() for name in await admin.lrange(prefix + "evaluations", 0, -1)]
    assert kept[0] == "heldout@0" and kept[-1] == "heldout@5" and "heldout@1" not in kept and len(kept) < 5
    assert {key.decode() for key in await admin.keys(prefix + "evaluation:*:headers")} == {
        f"{prefix}evaluation:{name}:headers" for name in kept[1:]
    }
    await refused(get(world, "heldout@1"), grpc.StatusCode.NOT_FOUND, "max_evaluation_bytes")
    held = [int(await admin.hget(f"{prefix}evaluation:{name}", "bytes") or 0) for name in kept]
    assert int(await admin.hget(prefix + "stats", "evaluation_bytes")) == sum(held) <= 700 + 2 * max(held)
