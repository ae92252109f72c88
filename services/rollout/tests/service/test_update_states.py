"""The weight update as its trainer sees it: every transition, good and bad."""

import asyncio
import time

import grpc
import pytest
from conftest import begin_request, finish_request, instance, join_request
from quartet.v1 import rollout_pb2

from quartet_common.durations import to_duration
from quartet_common.errors import describe
from quartet_rollout.engines import WeightInstallError, WeightTransferError


async def status(world):
    return await world.stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=5)


async def refused(call, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == code, caught.value
    return describe(caught.value)


def abort_request(version: int, epoch: int = 1) -> rollout_pb2.AbortWeightUpdateRequest:
    return rollout_pb2.AbortWeightUpdateRequest(
        run_id="demo", group_epoch=epoch, policy_version=version, reason="another rollout died"
    )


@pytest.fixture
async def joined(world):
    await world.start()
    await world.until(lambda: world.service._servicer.updates is not None)
    response = await world.stub.JoinWeightGroup(join_request(), timeout=5)
    assert response.ranks == 1
    return world


async def test_an_update_pauses_receives_installs_resumes(joined):
    world = joined
    await world.stub.BeginWeightUpdate(begin_request(4), timeout=5)
    assert (await status(world)).paused
    response = await world.stub.FinishWeightUpdate(finish_request(4), timeout=5)
    assert response.policy_version == 4 and response.paused.ToNanoseconds() > 0
    after = await status(world)
    assert (after.policy_version, after.group_epoch, after.paused) == (4, 1, False)
    wanted = ["start", "join 1", "pause keep False", "receive", "install 4", "resume"]
    assert world.engine.calls == wanted


async def test_each_call_may_be_repeated(joined):
    world = joined
    await world.stub.JoinWeightGroup(join_request(), timeout=5)
    for _ in range(2):
        await world.stub.BeginWeightUpdate(begin_request(4), timeout=5)
    answers = [await world.stub.FinishWeightUpdate(finish_request(4), timeout=5) for _ in range(2)]
    assert answers[0] == answers[1]
    assert world.engine.calls.count("join 1") == world.engine.calls.count("receive") == 1
    for _ in range(2):
        answer = await world.stub.AbortWeightUpdate(abort_request(4), timeout=5)
        assert answer.policy_version == 4  # too late: it is installed


async def test_join_answers_before_the_ranks_have_met_and_begin_waits_for_them(world):
    world.engine.meet.clear()
    await world.start()
    await world.until(lambda: world.service._servicer.updates is not None)
    await world.stub.JoinWeightGroup(join_request(), timeout=5)
    begin = asyncio.ensure_future(world.stub.BeginWeightUpdate(begin_request(1), timeout=5))
    await asyncio.sleep(0.2)
    assert not begin.done() and not (await status(world)).paused
    world.engine.meet.set()
    await begin


async def test_a_wrong_checksum_keeps_the_old_weights_and_leaves_the_epoch(joined):
    world = joined
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    sentence = await refused(
        world.stub.FinishWeightUpdate(finish_request(1, checksum=5), timeout=5), grpc.StatusCode.DATA_LOSS
    )
    assert "0000000000c0ffee" in sentence and "0000000000000005" in sentence
    after = await status(world)
    assert (after.policy_version, after.group_epoch, after.paused) == (0, -1, False)
    assert "install 1" not in world.engine.calls and world.engine.unpaused.is_set()
    assert {"leave", "discard"} <= set(world.engine.calls)
    await refused(world.stub.BeginWeightUpdate(begin_request(2), timeout=5), grpc.StatusCode.FAILED_PRECONDITION)
    await world.load(version=2, epoch=2)
    assert (await status(world)).policy_version == 2


async def test_a_failed_transfer_resumes_at_once_and_is_told_at_finish(joined):
    world = joined
    world.engine.transfer_error = WeightTransferError("the sender is gone")
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    await world.until(world.engine.unpaused.is_set)
    sentence = await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.ABORTED)
    assert "the sender is gone" in sentence
    assert (await status(world)).policy_version == 0


async def test_a_vanished_trainer_does_not_stop_generation_for_ever(joined):
    world = joined
    request = begin_request(1)
    request.timeout.seconds, request.timeout.nanos = 0, 400_000_000
    began = time.monotonic()
    await world.stub.BeginWeightUpdate(request, timeout=5)
    await world.until(world.engine.unpaused.is_set)
    assert 0.3 < time.monotonic() - began < 5
    await world.until(lambda: not world.service.state.paused)
    assert (await status(world)).policy_version == 0
    await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.ABORTED)
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)


async def test_a_transfer_that_hangs_ends_at_the_deadline(joined):
    world = joined
    world.engine.arrive.clear()
    request = begin_request(1)
    request.timeout.seconds, request.timeout.nanos = 0, 400_000_000
    await world.stub.BeginWeightUpdate(request, timeout=5)
    sentence = await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.ABORTED)
    assert "within 0.4 s" in sentence
    assert not (await status(world)).paused


async def test_a_failed_installation_leaves_no_version_and_generates_nothing(joined):
    world = joined
    world.engine.hold(1)
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.tokens_total > 0)
    world.engine.install_error = WeightInstallError("half of it went in")
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    sentence = await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.DATA_LOSS)
    assert "half of it went in" in sentence and "unknown" in sentence
    after = await status(world)
    assert (after.policy_version, after.group_epoch) == (-1, -1)
    assert world.engine.running == 0
    assert [release.failure for release in world.broker.releases] == [""]
    sentence = await refused(
        world.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=5), grpc.StatusCode.UNAVAILABLE
    )
    assert "no weights of a known version" in sentence
    world.engine.install_error = None
    world.engine.let_go()
    await world.load(version=1, epoch=2)
    await world.broker.submit(instance("next"))
    await world.broker.until(lambda: world.broker.puts)


async def test_an_abort_resumes_on_the_old_weights(joined):
    world = joined
    world.engine.arrive.clear()
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    finish = asyncio.ensure_future(world.stub.FinishWeightUpdate(finish_request(1), timeout=5))
    answer = await world.stub.AbortWeightUpdate(abort_request(1), timeout=5)
    assert answer.policy_version == 0
    assert "another rollout died" in await refused(finish, grpc.StatusCode.ABORTED)
    after = await status(world)
    assert (after.policy_version, after.group_epoch, after.paused) == (0, -1, False)
    answer = await world.stub.AbortWeightUpdate(abort_request(1), timeout=5)
    assert answer.policy_version == 0


async def test_a_new_epoch_ends_an_update_of_the_old_one(joined):
    world = joined
    world.engine.arrive.clear()
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    await world.stub.JoinWeightGroup(join_request(2), timeout=5)
    await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.ABORTED)
    assert (await status(world)).group_epoch == 2 and not (await status(world)).paused
    world.engine.arrive.set()
    await world.stub.BeginWeightUpdate(begin_request(1, epoch=2), timeout=5)
    await world.stub.FinishWeightUpdate(finish_request(1, epoch=2), timeout=5)


async def test_an_older_epoch_is_refused(joined):
    world = joined
    await world.stub.JoinWeightGroup(join_request(3), timeout=5)
    sentence = await refused(
        world.stub.JoinWeightGroup(join_request(2), timeout=5), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert "2 is older than this rollout's, 3" in sentence
    await refused(world.stub.BeginWeightUpdate(begin_request(1), timeout=5), grpc.StatusCode.FAILED_PRECONDITION)


async def test_an_invitation_to_a_group_that_never_forms_rules_out_no_later_one(world):
    world.engine.meet.clear()
    await world.start()
    await world.until(lambda: world.service._servicer.updates is not None)
    await world.stub.JoinWeightGroup(join_request(2**31 - 1, timeout=to_duration(0.01)), timeout=5)
    begin = world.stub.BeginWeightUpdate(begin_request(1, epoch=2**31 - 1), timeout=15)
    assert "not all ranks met" in await refused(begin, grpc.StatusCode.FAILED_PRECONDITION)
    world.engine.meet.set()
    await world.stub.JoinWeightGroup(join_request(1), timeout=5)
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)


@pytest.mark.parametrize(
    "request_, field",
    [
        (join_request(2**62), "group_epoch"),
        (join_request(timeout=to_duration(1e9)), "timeout"),
        (begin_request(2**53), "policy_version"),
        (begin_request(1, seconds=10**9), "timeout"),
    ],
)
async def test_numbers_that_no_run_can_have_are_refused_by_field(joined, request_, field):
    call = joined.stub.JoinWeightGroup if hasattr(request_, "store_port") else joined.stub.BeginWeightUpdate
    assert field in await refused(call(request_, timeout=5), grpc.StatusCode.INVALID_ARGUMENT)


async def test_the_same_epoch_on_another_store_is_a_new_group(joined):
    world = joined
    await world.stub.JoinWeightGroup(join_request(1, store_port=29501), timeout=5)
    await world.until(lambda: world.engine.group is not None and world.engine.group.store_port == 29501)
    assert world.engine.calls.count("join 1") == 2


async def test_a_second_version_is_refused_while_one_is_received(joined):
    world = joined
    world.engine.arrive.clear()
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    sentence = await refused(
        world.stub.BeginWeightUpdate(begin_request(2), timeout=5), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert "version 1 is being received" in sentence


async def test_a_failed_rendezvous_is_told_at_begin(world):
    async def fail(info):
        raise WeightTransferError("the store does not answer")

    world.engine.join_weight_group = fail
    await world.start()
    await world.until(lambda: world.service._servicer.updates is not None)
    await world.stub.JoinWeightGroup(join_request(), timeout=5)
    sentence = await refused(
        world.stub.BeginWeightUpdate(begin_request(1), timeout=5), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert "the store does not answer" in sentence


async def test_a_drain_in_the_middle_of_an_update_ends(joined):
    world = joined
    world.engine.arrive.clear()
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    async with asyncio.timeout(9):
        assert await world.stop() == 0
    assert world.engine.closed


async def test_a_finish_nobody_waits_for_still_installs(joined):
    world = joined
    world.engine.arrive.clear()
    await world.stub.BeginWeightUpdate(begin_request(1), timeout=5)
    await refused(world.stub.FinishWeightUpdate(finish_request(1), timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED)
    world.engine.arrive.set()
    await world.until(lambda: world.engine.policy_version == 1)
    assert (await world.stub.FinishWeightUpdate(finish_request(1), timeout=5)).policy_version == 1
