"""The weight update as its trainer sees it: every transition, good and bad."""

import asyncio
import time

import grpc
import pytest
from quartet.v1 import rollout_pb2
from world import begin_request, finish_request, instance, join_request, refused

from quartet_common.durations import to_duration
from quartet_rollout import weight_updates
from quartet_rollout.engines import EngineError, WeightInstallError, WeightTransferError


class Trainer:
    """The calls of a trainer, and what the rollout says of itself."""

    def __init__(self, world):
        self.world, self._stub = world, world.stub

    async def join(self, epoch: int = 1, **fields):
        return await self._stub.JoinWeightGroup(join_request(epoch, **fields), timeout=5)

    async def begin(self, version: int, epoch: int = 1, **fields):
        return await self._stub.BeginWeightUpdate(begin_request(version, epoch, **fields), timeout=5)

    async def finish(self, version: int, epoch: int = 1, timeout: float = 5, **fields):
        return await self._stub.FinishWeightUpdate(finish_request(version, epoch, **fields), timeout=timeout)

    async def abort(self, version: int) -> int:
        request = rollout_pb2.AbortWeightUpdateRequest(
            run_id="demo", group_epoch=1, policy_version=version, reason="another rollout died"
        )
        return (await self._stub.AbortWeightUpdate(request, timeout=5)).policy_version

    async def status(self) -> rollout_pb2.RolloutServiceGetStatusResponse:
        return await self._stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=5)

    async def stands(self) -> tuple[int, int, bool]:
        """(policy version, group epoch, whether weights are being taken)."""
        status = await self.status()
        return status.policy_version, status.group_epoch, status.paused


@pytest.fixture
async def trainer(ready):
    return Trainer(ready)


@pytest.fixture
async def joined(trainer):
    assert (await trainer.join()).ranks == 1
    return trainer


async def test_the_group_is_joined_by_the_configured_interface(world):
    await world.ready(weight_interface="lo")
    await Trainer(world).join()
    await world.until(lambda: world.engine.group is not None and world.engine.group.interface == "lo")


async def test_an_update_receives_pauses_installs_resumes(joined):
    await joined.begin(4)
    assert (await joined.stands())[2]
    response = await joined.finish(4)
    assert response.policy_version == 4 and response.paused.ToNanoseconds() > 0
    assert await joined.stands() == (4, 1, False)
    wanted = ["start", "join 1", "receive", "pause keep False", "install 4", "resume"]
    assert joined.world.engine.calls == wanted


async def test_join_answers_before_the_ranks_have_met_and_begin_waits_for_them(trainer):
    engine = trainer.world.engine
    engine.meet.clear()
    await trainer.join()
    begin = asyncio.ensure_future(trainer.begin(1))
    await trainer.world.until(lambda: "join 1" in engine.calls)
    assert not begin.done() and not (await trainer.stands())[2]
    engine.meet.set()
    await begin


async def test_a_wrong_checksum_keeps_the_old_weights_and_leaves_the_epoch(joined):
    engine = joined.world.engine
    await joined.begin(1)
    sentence = await refused(joined.finish(1, checksum=5), grpc.StatusCode.DATA_LOSS)
    assert "0000000000c0ffee" in sentence and "0000000000000005" in sentence
    assert await joined.stands() == (0, -1, False)
    assert "install 1" not in engine.calls and engine.unpaused.is_set()
    assert {"leave", "discard"} <= set(engine.calls)
    await refused(joined.begin(2), grpc.StatusCode.FAILED_PRECONDITION)
    await joined.world.load(version=2, epoch=2)
    assert (await joined.stands())[0] == 2


async def test_a_failed_transfer_is_told_at_finish(joined):
    engine = joined.world.engine
    engine.errors["receive"] = WeightTransferError("the sender is gone")
    await joined.begin(1)
    assert "the sender is gone" in await refused(joined.finish(1), grpc.StatusCode.ABORTED)
    assert (await joined.stands())[0] == 0


async def test_generation_goes_on_while_weights_arrive_and_a_pause_that_does_not_come_costs_the_update(joined):
    world = joined.world
    world.engine.arrive.clear()
    await joined.begin(1)
    await world.put(instance())
    world.engine.arrive.set()
    world.engine.errors["pause"] = EngineError("a step does not end")
    assert "a step does not end" in await refused(joined.finish(1), grpc.StatusCode.ABORTED)
    assert await joined.stands() == (0, -1, False)
    assert "install 1" not in world.engine.calls and world.engine.unpaused.is_set()


async def test_a_vanished_trainer_costs_the_update_at_its_deadline(joined):
    world, began = joined.world, time.monotonic()
    await joined.begin(1, seconds=0.2)
    await world.until(lambda: "leave" in world.engine.calls)
    assert time.monotonic() - began >= 0.2
    assert (await joined.stands())[0] == 0
    await refused(joined.finish(1), grpc.StatusCode.ABORTED)
    await world.put(instance())


async def test_a_transfer_that_hangs_ends_at_the_deadline(joined):
    joined.world.engine.arrive.clear()
    await joined.begin(1, seconds=0.2)
    assert "within 0.2 s" in await refused(joined.finish(1), grpc.StatusCode.ABORTED)
    assert not (await joined.stands())[2]


async def test_a_failed_installation_leaves_no_version_and_generates_nothing(joined):
    world = joined.world
    world.engine.hold(1)
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.tokens_total > 0)
    world.engine.errors["install"] = WeightInstallError("half of it went in")
    await joined.begin(1)
    sentence = await refused(joined.finish(1), grpc.StatusCode.DATA_LOSS)
    assert "half of it went in" in sentence and "unknown" in sentence
    assert (await joined.stands())[:2] == (-1, -1)
    assert world.engine.running == 0
    assert [release.failure for release in world.broker.releases] == [""]
    generate = world.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=5)
    assert "no weights of a known version" in await refused(generate, grpc.StatusCode.UNAVAILABLE)
    world.engine.errors.clear()
    world.engine.let_go()
    await world.load(version=1, epoch=2)
    await world.put(instance("next"))


async def test_an_abort_resumes_on_the_old_weights(joined):
    joined.world.engine.arrive.clear()
    await joined.begin(1)
    finish = asyncio.ensure_future(joined.finish(1))
    assert await joined.abort(1) == 0
    assert "another rollout died" in await refused(finish, grpc.StatusCode.ABORTED)
    assert await joined.stands() == (0, -1, False)
    assert await joined.abort(1) == 0


async def test_a_new_epoch_ends_an_update_of_the_old_one(joined):
    joined.world.engine.arrive.clear()
    await joined.begin(1)
    await joined.join(2)
    await refused(joined.finish(1), grpc.StatusCode.ABORTED)
    assert (await joined.stands())[1:] == (2, False)
    joined.world.engine.arrive.set()
    await joined.begin(1, epoch=2)
    await joined.finish(1, epoch=2)


async def test_an_older_epoch_is_refused(joined):
    await joined.join(3)
    assert "2 is older than this rollout's, 3" in await refused(joined.join(2), grpc.StatusCode.FAILED_PRECONDITION)
    await refused(joined.begin(1), grpc.StatusCode.FAILED_PRECONDITION)


async def test_the_newest_epoch_is_told_also_after_it_was_left(joined):
    """By it a trainer that was killed, and started again, makes the next group."""
    await joined.join(23)
    await joined.begin(1, epoch=23)
    await refused(joined.finish(1, epoch=23, checksum=1), grpc.StatusCode.DATA_LOSS)
    status = await joined.status()
    assert (status.group_epoch, status.newest_group_epoch) == (-1, 23)
    assert "3 is older than this rollout's, 23" in await refused(joined.join(3), grpc.StatusCode.FAILED_PRECONDITION)
    assert status.instance_id == joined.world.host.instance_id


async def test_an_invitation_to_a_group_that_never_forms_rules_out_no_later_one(trainer, monkeypatch):
    monkeypatch.setattr(weight_updates, "_JOIN_GRACE_SECONDS", 0.1)
    engine = trainer.world.engine
    engine.meet.clear()
    await trainer.join(2**31 - 1, timeout=to_duration(0.01))
    begin = trainer.begin(1, epoch=2**31 - 1)
    assert "not all ranks met" in await refused(begin, grpc.StatusCode.FAILED_PRECONDITION)
    engine.meet.set()
    await trainer.join(1)
    await trainer.begin(1)


async def test_the_same_epoch_on_another_store_is_a_new_group(joined):
    engine = joined.world.engine
    await joined.join(1, store_port=29501)
    await joined.world.until(lambda: engine.group is not None and engine.group.store_port == 29501)
    assert engine.calls.count("join 1") == 2


async def test_a_failed_rendezvous_is_told_at_begin(trainer):
    trainer.world.engine.errors["join"] = WeightTransferError("the store does not answer")
    await trainer.join()
    assert "the store does not answer" in await refused(trainer.begin(1), grpc.StatusCode.FAILED_PRECONDITION)


async def test_a_drain_in_the_middle_of_an_update_ends(joined):
    joined.world.engine.arrive.clear()
    await joined.begin(1)
    async with asyncio.timeout(9):
        assert await joined.world.stop() == 0
    assert joined.world.engine.closed


async def test_a_finish_nobody_waits_for_still_installs(joined):
    engine = joined.world.engine
    engine.arrive.clear()
    await joined.begin(1)
    await refused(joined.finish(1, timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED)
    engine.arrive.set()
    await joined.world.until(lambda: engine.policy_version == 1)
    assert (await joined.finish(1)).policy_version == 1
