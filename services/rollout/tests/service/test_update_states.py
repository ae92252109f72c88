"""The weight update as its trainer sees it: every transition, good and bad."""

import asyncio
import time

import grpc
import pytest
from quartet.v1 import rollout_pb2
from world import instance, join_request, refused

from quartet_common.durations import to_duration
from quartet_rollout import weight_updates
from quartet_rollout.engines import EngineError, WeightInstallError, WeightTransferError

DATA_LOSS, ABORTED = grpc.StatusCode.DATA_LOSS, grpc.StatusCode.ABORTED
SENT = 0xC0FFEE
"""The checksum of the test engine."""


@pytest.fixture
async def joined(ready):
    assert (await ready.join()).ranks == 1
    return ready


async def stands(world) -> tuple[int, int, bool]:
    """(policy version, group epoch, whether weights are being taken)."""
    status = await world.status()
    return status.policy_version, status.group_epoch, status.paused


async def test_an_update_receives_pauses_installs_resumes(joined):
    await joined.begin(4)
    assert (await stands(joined))[2]
    response = await joined.finish(4)
    assert response.policy_version == 4 and response.paused.ToNanoseconds() > 0
    assert await stands(joined) == (4, 1, False)
    wanted = ["start", "join 1", "receive", "pause keep False", "install 4", "resume"]
    assert joined.engine.calls == wanted


async def test_the_pause_is_told_without_the_wait_for_running_completions(joined, monkeypatch):
    pause, ended = joined.engine.pause, 0.0

    async def after_running_completions(*how) -> int:
        nonlocal ended
        await asyncio.sleep(0.2)
        ended = time.monotonic()
        return await pause(*how)

    monkeypatch.setattr(joined.engine, "pause", after_running_completions)
    await joined.begin(4, pause_mode=rollout_pb2.PAUSE_MODE_WAIT)
    response = await joined.finish(4)
    assert response.paused.ToNanoseconds() <= 1e9 * (time.monotonic() - ended)


async def test_join_answers_before_the_ranks_have_met_and_begin_waits_for_them(ready):
    engine = ready.engine
    engine.meet.clear()
    await ready.join()
    begin = asyncio.ensure_future(ready.begin(1))
    await ready.until(lambda: "join 1" in engine.calls)
    assert not begin.done() and not (await stands(ready))[2]
    engine.meet.set()
    await begin


@pytest.mark.parametrize(
    ("errors", "seconds", "checksum", "code", "words"),
    [
        ({}, 20, 5, DATA_LOSS, "received 0000000000c0ffee, sent 0000000000000005"),
        ({"receive": WeightTransferError("the sender is gone")}, 20, SENT, ABORTED, "the sender is gone"),
        ({"receive": KeyError("a hawk")}, 20, SENT, ABORTED, "KeyError: 'a hawk'"),
        ({"pause": EngineError("a step does not end")}, 20, SENT, ABORTED, "a step does not end"),
        ({"pause": KeyError("a hawk")}, 20, SENT, ABORTED, "KeyError: 'a hawk'"),
        ({}, 0.2, SENT, ABORTED, "within 0.2 s"),
    ],
    ids=["another checksum", "no transfer", "an engine's bug in it", "no pause", "a bug in it", "no trainer"],
)
async def test_an_update_that_fails_keeps_the_old_weights_and_leaves_the_epoch(
    joined, errors, seconds, checksum, code, words
):
    engine = joined.engine
    engine.errors |= errors
    if seconds < 1:
        engine.arrive.clear()
    await joined.begin(1, seconds=seconds)
    assert words in await refused(joined.finish(1, checksum=checksum), code)
    assert await stands(joined) == (0, -1, False)
    assert "install 1" not in engine.calls and engine.unpaused.is_set()
    assert "leave" in engine.calls
    await refused(joined.begin(2), grpc.StatusCode.FAILED_PRECONDITION)
    engine.errors.clear()
    engine.arrive.set()
    await joined.load(version=2, epoch=2)
    assert (await stands(joined))[0] == 2


async def test_generation_goes_on_while_weights_arrive_and_a_finish_nobody_waits_for_still_installs(joined):
    joined.engine.arrive.clear()
    await joined.begin(1)
    await joined.put(instance())
    await refused(joined.finish(1, timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED)
    joined.engine.arrive.set()
    await joined.until(lambda: joined.engine.policy_version == 1)
    assert (await joined.finish(1)).policy_version == 1


async def test_the_first_bucket_that_came_otherwise_is_named(joined):
    joined.engine.checksums = [7, 8, SENT]  # up to the end of each bucket
    await joined.begin(1, buckets=3)
    few = joined.finish(1, bucket_checksums=[7, SENT])
    assert "bucket_checksums: got 2; allowed: none, or all 3" in await refused(few, grpc.StatusCode.INVALID_ARGUMENT)
    sentence = await refused(joined.finish(1, bucket_checksums=[7, 9, SENT]), DATA_LOSS)
    assert "bucket 2 of 3: received 0000000000000008, sent 0000000000000009" in sentence
    await joined.join(2)
    await joined.begin(1, epoch=2, buckets=3)
    assert (await joined.finish(1, epoch=2, bucket_checksums=[7, 8, SENT])).policy_version == 1


@pytest.mark.parametrize("error", [WeightInstallError("half of it went in"), KeyError("half of it went in")], ids=repr)
async def test_a_failed_installation_leaves_no_version_and_generates_nothing(joined, error):
    joined.engine.hold(1)
    await joined.broker.submit(instance())
    await joined.until(lambda: joined.engine.tokens_total > 0)
    joined.engine.errors["install"] = error
    await joined.begin(1)
    sentence = await refused(joined.finish(1), DATA_LOSS)
    assert "half of it went in" in sentence and "unknown" in sentence
    assert (await stands(joined))[:2] == (-1, -1)
    assert joined.engine.running == 0
    assert [release.failure for release in joined.broker.releases] == [""]
    generate = joined.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=5)
    assert "no weights of a known version" in await refused(generate, grpc.StatusCode.UNAVAILABLE)
    joined.engine.errors.clear()
    joined.engine.let_go()
    await joined.load(version=1, epoch=2)
    await joined.put(instance("next"))


async def test_an_abort_resumes_on_the_old_weights(joined):
    joined.engine.arrive.clear()
    await joined.begin(1)
    finish = asyncio.ensure_future(joined.finish(1))
    assert await joined.abort(1) == 0
    assert "another rollout died" in await refused(finish, ABORTED)
    assert await stands(joined) == (0, -1, False)
    assert await joined.abort(1) == 0


async def test_a_new_epoch_ends_an_update_of_the_old_one(joined):
    joined.engine.arrive.clear()
    await joined.begin(1)
    await joined.join(2)
    await refused(joined.finish(1), ABORTED)
    assert (await stands(joined))[1:] == (2, False)
    joined.engine.arrive.set()
    await joined.begin(1, epoch=2)
    await joined.finish(1, epoch=2)


async def test_the_newest_epoch_is_told_also_after_it_was_left(joined):
    """By it a trainer that was killed, and started again, makes the next group."""
    await joined.join(23)
    await joined.begin(1, epoch=23)
    await refused(joined.finish(1, epoch=23, checksum=1), DATA_LOSS)
    status = await joined.status()
    assert (status.group_epoch, status.newest_group_epoch) == (-1, 23)
    assert "3 is older than this rollout's, 23" in await refused(joined.join(3), grpc.StatusCode.FAILED_PRECONDITION)
    assert status.instance_id == joined.host.instance_id


async def test_an_invitation_to_a_group_that_never_forms_rules_out_no_later_one(ready, monkeypatch):
    monkeypatch.setattr(weight_updates, "_JOIN_GRACE_SECONDS", 0.1)
    engine = ready.engine
    engine.meet.clear()
    await ready.join(2**31 - 1, timeout=to_duration(0.01))
    begin = ready.begin(1, epoch=2**31 - 1)
    assert "not all ranks met" in await refused(begin, grpc.StatusCode.FAILED_PRECONDITION)
    engine.meet.set()
    engine.errors["join"] = ConnectionError("the store does not answer")  # of a kind that no engine should raise
    await ready.join(1)
    assert "the store does not answer" in await refused(ready.begin(1), grpc.StatusCode.FAILED_PRECONDITION)
    engine.errors.clear()
    await ready.join(1, store_port=29501)  # the same epoch on another store is a new group
    await ready.begin(1)
    assert engine.group.store_port == 29501


async def test_a_join_that_its_trainer_cancels_leaves_the_old_epoch_all_the_same(ready, monkeypatch):
    leaving, left = asyncio.Event(), asyncio.Event()

    async def join_and_leave_slowly(info) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            await left.wait()

    monkeypatch.setattr(ready.engine, "join_weight_group", join_and_leave_slowly)
    await ready.join(1)
    call = ready.stub.JoinWeightGroup(join_request(2), timeout=5)
    await leaving.wait()
    call.cancel()
    begin = await refused(ready.begin(1, epoch=1, seconds=0.3), grpc.StatusCode.FAILED_PRECONDITION)
    left.set()
    assert "this rollout is in no weight group: group epoch 2 began" in begin


async def test_a_drain_in_the_middle_of_an_update_ends(joined):
    joined.engine.arrive.clear()
    await joined.begin(1)
    async with asyncio.timeout(9):
        assert await joined.stop() == 0
    assert joined.engine.closed
