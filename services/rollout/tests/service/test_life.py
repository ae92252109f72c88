"""The service among its neighbors: waiting, registering, draining, runs that end and come again."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import REGISTRY
from quartet.v1 import broker_pb2, experience_pb2, rollout_pb2
from world import instance, refused

from quartet_rollout.engines import EngineError


async def test_it_says_what_it_waits_for_and_leases_nothing_without_weights(world):
    world.broker.run = None
    world.engine.policy_version = -1
    await world.start()
    wanted = {"run 'demo' to be created", "weights from the trainer"}
    await world.until(lambda: set(world.host.waiting) == wanted)
    status = await world.status()
    assert (status.policy_version, status.group_epoch, status.run_id) == (-1, -1, "")
    assert set(status.waiting_for) == wanted
    world.broker.create_run(member_ttl=Duration(seconds=1))  # three heartbeats a second
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.calls.count("heartbeat") == 2)
    (member,) = world.broker.members.values()
    assert (member.state, member.policy_version) == (broker_pb2.MEMBER_STATE_JOINING, -1)
    assert not world.broker.lease_versions
    await world.load(version=0)
    await world.broker.until(lambda: world.broker.puts)
    assert not list(world.host.waiting)


async def test_weights_of_the_model_folder_that_have_a_version_are_leased_for_without_a_trainer(world):
    world.engine.policy_version = -1
    await world.start(initial_version=40)
    await world.put(instance())
    assert set(world.broker.lease_versions) == {40}
    await world.load(version=41)  # as any other weights, they make place for a trainer's
    await world.until(lambda: world.engine.policy_version == 41)


async def test_the_broker_hears_of_new_weights_at_once(world):
    world.broker.create_run(member_ttl=Duration(seconds=180))  # a heartbeat by the clock comes after 60 s
    await world.start()
    await world.broker.until(lambda: "heartbeat" in world.broker.calls)
    await world.load(version=5)
    await world.broker.until(lambda: any(member.policy_version == 5 for member in world.broker.members.values()))
    member = world.broker.members[world.host.instance_id]
    assert member.state == broker_pb2.MEMBER_STATE_ACTIVE
    assert {"tokens_per_second", "running", "kv_cache_use"} <= set(member.gauges)


async def test_a_forgotten_member_registers_again(world):
    await world.start()
    await world.broker.until(lambda: "heartbeat" in world.broker.calls)
    world.broker.members.clear()
    await world.broker.until(lambda: world.broker.calls.count("register") == 2)
    await world.put(instance())


async def test_a_drain_gives_leases_back_without_a_failure_and_leaves(world):
    world.engine.unpaused.clear()
    await world.start()
    await world.broker.submit(instance("a"), instance("b"))
    await world.until(lambda: len(world.engine.requests) == 2)
    assert await world.stop() == 0
    assert sorted(release.failure for release in world.broker.releases) == ["", ""]
    assert not world.broker.leases and world.broker.left == [world.host.instance_id]
    assert world.engine.closed and world.engine.running == 0
    assert world.broker.calls.index("release") < world.broker.calls.index("leave")


async def test_a_rollout_that_has_left_does_not_register_again_while_direct_generation_ends(world):
    world.broker.run.spec.member_ttl.CopyFrom(Duration(nanos=300_000_000))
    world.engine.unpaused.clear()
    await world.ready(drain_seconds=3.0)
    generate = world.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=30.0)
    await world.until(lambda: world.engine.running)
    assert await world.stop() == 0
    assert "not finished in time" in await refused(generate, grpc.StatusCode.UNAVAILABLE)
    assert world.broker.calls.count("register") == 1 and not world.broker.members


async def test_a_drain_ends_in_time_without_broker(world):
    world.engine.unpaused.clear()
    await world.start(drain_seconds=1.2)
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.requests)
    await world.broker_host.drain()
    async with asyncio.timeout(9):
        assert await world.stop() == 0


async def test_work_of_a_finished_run_stops_and_a_new_run_starts_without_weights(world):
    world.engine.unpaused.clear()
    await world.start()
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.requests)
    world.broker.run.state = broker_pb2.RUN_STATE_SUCCEEDED
    world.service.membership.request_heartbeat()
    await world.until(lambda: world.engine.running == 0)
    await world.until(lambda: "run 'demo' to be created" in world.host.waiting)
    assert world.host.instance_id in world.broker.left
    world.engine.unpaused.set()
    answer = await world.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "hi"}), timeout=5)
    assert len(answer.completions) == 2

    world.broker.create_run()
    await world.until(lambda: world.engine.policy_version == -1)
    await world.broker.until(lambda: world.broker.members)
    await world.load(version=0, epoch=1)
    await world.put(instance("again"))


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("errors", {"start": EngineError("no such model")}, "the engine could not be loaded: no such model"),
        ("failure", "the engine's process ended with signal 9", "stopping: the engine's process ended with signal 9"),
    ],
)
async def test_an_engine_that_cannot_be_loaded_or_is_lost_while_nothing_is_generated_ends_the_service(
    world, caplog, attribute, value, said
):
    caplog.set_level("INFO")
    setattr(world.engine, attribute, value)
    await world.start()
    await world.until(world.host.stopping.is_set)
    assert await world.stop() == 1
    assert said in caplog.text


async def test_metrics_count_the_tokens_of_each_purpose(world):
    def counted() -> list[float]:
        name = "quartet_rollout_tokens_total"
        return [REGISTRY.get_sample_value(name, {"purpose": purpose}) or 0 for purpose in ("train", "evaluate")]

    train, evaluate = counted()
    await world.put(instance("a"), instance("b", purpose=experience_pb2.PURPOSE_EVALUATE))
    assert counted() == [train + 7, evaluate + 3]


async def test_generated_tokens_are_counted_for_the_run_and_forgotten_with_it(world):
    def counted(run: str) -> float | None:
        return REGISTRY.get_sample_value("quartet_rollout_generated_tokens_total", {"run": run})

    await world.put(instance("a"))
    await world.until(lambda: counted("demo") and counted("demo") == world.engine.tokens_total)
    world.broker.create_run(run_id="demo")  # recreated
    world.broker.members.clear()
    await world.until(lambda: world.broker.calls.count("register") == 2)
    await world.until(lambda: counted("demo") == 0)
