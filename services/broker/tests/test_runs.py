"""Runs: making, defaults, differences, deletion; what callers may not send."""

import asyncio
import math

import grpc
import pytest
from annotated_types import Ge, Le, Lt
from conftest import on_both
from google.protobuf.duration_pb2 import Duration
from prometheus_client import REGISTRY
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from world import EVALUATE, SERVE, World, instance, refused

from quartet_broker import keys, metrics, runs, sweeper
from quartet_broker.runs import with_defaults
from quartet_common.config import RunSection
from quartet_common.durations import to_duration
from quartet_common.run_spec import run_spec
from quartet_common.sections import EnvironmentSection, VerifierSection

INVALID = grpc.StatusCode.INVALID_ARGUMENT


BOUNDS = [
    (field, rule.lt - 1 if isinstance(rule, Lt) else rule.ge if isinstance(rule, Ge) else rule.le)
    for field, info in RunSection.model_fields.items()
    for rule in info.metadata
    if isinstance(rule, Ge | Le | Lt)
]


@pytest.mark.parametrize(("field", "limit"), BOUNDS)
def test_the_broker_takes_what_a_run_file_may_say(field, limit):
    said = run_spec(RunSection.model_validate({field: limit}))
    assert runs.complete(said) == runs.with_defaults(said)


async def test_a_run_of_an_earlier_release_is_confirmed_whatever_defaults_are_said_today(world):
    """It stored no key that it did not have; a client sends keys at their defaults, or leaves them out."""
    section = RunSection(id=world.run_id, verifiers=[VerifierSection(name="boxed")], environment=EnvironmentSection())
    said, earlier = run_spec(section), pb.RunSpec(run_id=world.run_id, verifiers=[{"name": "boxed"}], environment={})
    earlier.sampling.max_new_tokens = said.sampling.max_new_tokens
    await world.stub.CreateRun(pb.CreateRunRequest(spec=earlier))
    await world.redis.hset(keys.run(world.run_id), "spec", earlier.SerializeToString())
    for spec in (said, earlier):
        assert not (await world.stub.CreateRun(pb.CreateRunRequest(spec=spec))).created
    for field, value in (("min_p", 0.1), ("top_k", 5), ("temperature", 0.0), ("seed", 0), ("min_tokens", 2)):
        other = run_spec(section)
        setattr(other.sampling, field, value)
        await refused(
            world.stub.CreateRun(pb.CreateRunRequest(spec=other)), grpc.StatusCode.ALREADY_EXISTS, "sampling is", field
        )


async def test_a_run_that_succeeded_goes_on_and_every_group_counts_once(world):
    await world.create(max_staleness=4, max_steps=1)
    await world.submit("a", "b", "c")
    await world.open()
    await world.generate()
    await world.batch(0)
    await world.trained(0)
    await world.commit(1)
    await world.end_prompts()
    await world.finish(pb.RUN_STATE_SUCCEEDED, "done")
    for _ in range(2):
        run = await extend(world, max_steps=2)
        assert (run.state, run.reason, run.spec.max_steps) == (pb.RUN_STATE_ACTIVE, "", 2)
    await refused(extend(world, max_steps=2, group_size=3), grpc.StatusCode.ALREADY_EXISTS, "group_size")
    submitted = await world.submit("a", "d", data_pass=0)
    assert (submitted.accepted, submitted.duplicates) == (1, 1)
    await world.open(checkpoint=1)
    await world.generate(version=1)
    assert await world.batch(1) == ["c", "d"]
    await world.trained(1)
    await world.commit(2)
    await world.finish(pb.RUN_STATE_SUCCEEDED, "done again")
    events = [answer.event async for answer in world.call("WatchRun")]
    said = [event.run_state.reason for event in events if event.HasField("run_state")]
    assert said == ["", "done", "extended to step 2", "resumed at step 1", "done again"]
    assert (await world.stats()).committed == 4 and not await world.faults()


async def extend(world, **spec) -> pb.Run:
    stands = (await world.run()).spec
    for field, value in spec.items():
        setattr(stands, field, value)
    return (await world.stub.CreateRun(pb.CreateRunRequest(spec=stands, extend=True))).run


def test_a_served_environment_keeps_the_time_of_a_whole_episode():
    for served, seconds in ((False, 60), (True, None)):
        environment = with_defaults(run_spec(RunSection(environment={"name": "chess", "served": served}))).environment
        assert environment.served is served
        assert (environment.answer_deadline.seconds if environment.HasField("answer_deadline") else None) == seconds


def test_every_scalar_of_a_specification_that_is_unset_or_at_its_default_is_the_same():
    """Of each field that can tell unset from zero the run file has the default, or nothing stands for it."""
    said = with_defaults(run_spec(RunSection(environment=EnvironmentSection())))
    without = {
        (message.DESCRIPTOR.name, field.name)
        for message in (said, said.sampling, said.evaluation_sampling, said.environment)
        for field in message.DESCRIPTOR.fields
        if field.message_type is None and field.has_presence and not message.HasField(field.name)
    }
    assert without == {("SamplingParams", "seed")}


async def test_a_run_that_another_build_laid_out_is_refused_by_every_script_and_can_be_deleted(world):
    """v1.0's runs bear no number, and their ready groups are a list: WRONGTYPE to whoever takes it for a sorted set."""
    await world.create()
    await world.submit("a")
    await world.redis.hdel(keys.run(world.run_id), "layout")
    await world.redis.delete(keys.prefix(world.run_id) + "ready")
    await world.redis.rpush(keys.prefix(world.run_id) + "ready", "x")
    calls = world.create(), world.submit("b"), world.ask(), world.open(), world.register("r2"), world.end_prompts()
    for call in calls:
        details = await refused(call)
        assert "layout 1, and this broker's is 2: finish it with the build that began it, or delete it" in details
    assert (await world.stub.ListRuns(pb.ListRunsRequest())).runs[0].spec.run_id == world.run_id
    assert await world.delete(force=True)
    assert await world.redis.keys(keys.prefix(world.run_id) + "*") == []
    assert (await world.create()).state == pb.RUN_STATE_ACTIVE


async def fill(world: World) -> None:
    """Have something of every kind that a run keeps."""
    await world.create(members=("r1", "r2"), groups_per_step=2, max_staleness=5, max_deliveries=1)
    await world.submit("e", "f", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(0)
    await world.submit("pinned", purpose=SERVE, pinned_version=7)
    await world.submit("s", "t", purpose=SERVE)
    await world.submit(*(f"p{n}" for n in range(20)))
    await world.open()
    await world.generate(9)  # delivered, and five ready
    await world.train(0)
    await world.commit(1)
    await world.batch(1)
    (dying, _) = await world.lease(2, 1)
    await world.release(dying.lease_id, "it broke")


async def keys_of(world: World) -> list[bytes]:
    return [key async for key in world.redis.scan_iter(match=f"q:{{{world.run_id}}}:*")]


async def until_gone(world: World) -> None:
    """Wait for the sweeper."""
    async with asyncio.timeout(30):
        while await keys_of(world) or await world.redis.zscore(keys.RUNS, world.run_id) is not None:
            await asyncio.sleep(0.05)  # nobody is told: the run does not exist any more


@on_both
async def test_a_deleted_run_leaves_nothing(world):
    await fill(world)
    kinds = {key.split(b":", 3)[2] for key in await keys_of(world)}
    assert kinds >= {b"batch", b"dead", b"evaluation", b"payload", b"prompts", b"result", b"set", b"settled"}, kinds
    await refused(world.delete(), grpc.StatusCode.FAILED_PRECONDITION, "active")
    assert await world.delete(force=True)
    assert await keys_of(world) == []
    assert not await world.delete()
    await refused(world.run(), grpc.StatusCode.NOT_FOUND, world.run_id)
    await world.create()
    assert (await world.stats()).submitted == 0


async def test_a_half_deleted_run_does_not_exist_and_the_sweeper_finishes_the_work(world):
    await fill(world)
    await world.redis.hset(keys.run(world.run_id), "state", "DELETING")
    await refused(world.run(), grpc.StatusCode.NOT_FOUND)
    await until_gone(world)
    await world.create()
    assert (await world.stats()).submitted == 0


async def test_a_run_that_is_deleted_while_it_is_swept_is_no_trouble_of_redis(world, broker, monkeypatch):
    _, _, host = broker
    await world.create()
    load, times, again = runs.Runs.load, 0, asyncio.Event()

    async def gone(self, run_id):
        nonlocal times
        if run_id != world.run_id:
            return await load(self, run_id)
        times += 1
        if times == 2:
            again.set()
        raise runs.run_not_found(run_id)

    monkeypatch.setattr(runs.Runs, "load", gone)
    async with asyncio.timeout(20):
        await again.wait()
    assert not host.stopping.is_set() and not any("Redis" in thing for thing in host.waiting)


@pytest.mark.broker(finished_run_ttl=1.0)
async def test_a_finished_run_goes_when_its_time_is_over(world):
    active = World(world.stub, world.redis, world.run_id + "-active")
    for each in (world, active):
        await fill(each)
    await world.finish()
    assert (await world.run()).state == pb.RUN_STATE_SUCCEEDED
    await until_gone(world)
    assert (await active.run()).state == pb.RUN_STATE_ACTIVE


@pytest.mark.parametrize("deleted", [False, True])
async def test_of_a_run_that_ended_a_while_ago_or_is_deleted_no_metric_is_left(world, broker, monkeypatch, deleted):
    monkeypatch.setattr(sweeper, "_SHOWN_SECONDS", 900.0 if deleted else 0.0)
    await fill(world)
    async with asyncio.timeout(30):
        while not series_of(world) >= RUN_SERIES:
            await asyncio.sleep(0.05)
        assert REGISTRY.get_sample_value("quartet_broker_run_active", {"run": world.run_id}) == 1
        await world.finish()
        if deleted:
            await world.delete()
        while series_of(world):
            await asyncio.sleep(0.05)


async def test_a_run_that_has_ended_is_shown_as_not_active(world, broker):
    await fill(world)
    await world.finish()
    async with asyncio.timeout(30):
        while REGISTRY.get_sample_value("quartet_broker_run_active", {"run": world.run_id}) != 0:
            await asyncio.sleep(0.05)


FAMILIES = [family for metric in metrics.OF_A_RUN for family in metric.describe()]
RUN_SERIES = {family.name + ("_total" if family.type == "counter" else "") for family in FAMILIES}


def series_of(world: World) -> set[str]:
    """Return the names of the metrics that are labeled with a run."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return {sample.name for sample in samples if sample.labels.get("run") == world.run_id} & RUN_SERIES


async def test_a_large_run_is_deleted_in_steps_of_bounded_work(world):
    """No step holds Redis up: each runs a bounded number of commands, and frees what is large on another thread."""
    await world.create()
    prefix, names = keys.prefix(world.run_id), [f"pass-0/{n}" for n in range(3000)]
    async with world.redis.pipeline(transaction=False) as pipeline:
        pipeline.hset(prefix + "settled", mapping=dict.fromkeys(names, "COMMITTED|" + "d" * 32 + "|1|3|0"))
        pipeline.rpush(prefix + "settled:order", *names)
        for name in names:
            pipeline.set(f"{prefix}result:{name}", b"x" * 100)
        pipeline.zadd(prefix + "results:TRAIN", dict.fromkeys(names, 1e15))
        await pipeline.execute()
    await world.finish()
    steps: list[list[str]] = []
    async with world.redis.monitor() as monitor:
        assert await world.delete()
        await world.redis.echo("deleted")
        while (seen := await monitor.next_command())["command"] != "ECHO deleted":
            if seen["client_type"] != "lua":
                steps.append([])
            elif steps:  # else of a script that had begun before
                steps[-1].append(seen["command"].partition(" ")[0].upper())
    assert await keys_of(world) == []
    assert max(map(len, steps)) <= 700, "500 instances and what finds them"
    used = {command for step in steps for command in step}
    assert "UNLINK" in used and not used & {"DEL", "HGETALL", "LRANGE", "SMEMBERS"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"max_queued_prompts": -5}, "spec.max_queued_prompts"),
        ({"prompt_lease_ttl": to_duration(-1)}, "spec.prompt_lease_ttl"),
        ({"member_ttl": Duration(seconds=9, nanos=10**9)}, "spec.member_ttl.nanos: got 1000000000"),
        ({"sampling": {"top_p": 0}}, "spec.sampling.top_p: got 0.0; allowed: in (0, 1]"),
        ({"sampling": {"logit_bias": {5: 101}}}, "spec.sampling.logit_bias: got 101.0; allowed: input should be less"),
        ({"environment": {"max_turns": 2000}}, "spec.environment.max_turns"),
        ({"environment": {"parameters": {"levels": [1, math.inf]}}}, "spec.environment.parameters.levels[1]: got inf"),
        ({"verifiers": [{"name": "boxed", "weight": math.inf}]}, "spec.verifiers[0].weight: got inf"),
        (
            {"temperature_schedule": {"points": [{"policy_version": 3, "temperature": 1}] * 2}},
            "spec.temperature_schedule.points[1].policy_version",
        ),
    ],
)
async def test_bad_specs_are_refused_by_field(world, spec, field):
    details = await refused(
        world.stub.CreateRun(pb.CreateRunRequest(spec=pb.RunSpec(**({"run_id": world.run_id} | spec)))), INVALID
    )
    assert details.startswith(field), details


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instance_id": "x" * 257}, "instances[0].instance_id"),
        ({"data_pass": -1}, "instances[0].data_pass"),
        ({"prompt": {"chat": {"messages": [{"role": "robot"}]}}}, "instances[0].prompt.chat.messages[0].role"),
        (
            {"prompt": {"text": "a", "verifiers": [{"name": "boxed", "parameters": {"by": {"level": [math.nan]}}}]}},
            "instances[0].prompt.verifiers[0].parameters.by.level[0]: got nan",
        ),
        (
            {"prompt": {"text": "a", "sampling": {"presence_penalty": 0.5}}},
            "instances[0].prompt.sampling.presence_penalty: got 0.5; allowed: unset for PURPOSE_TRAIN",
        ),
    ],
)
async def test_bad_prompts_are_refused_by_field_and_nothing_is_queued(world, changes, field):
    await world.create()
    fields = {"instance_id": "a", "purpose": 1, "prompt": instance("a").prompt} | changes
    bad = experience_pb2.PromptInstance(**fields)
    details = await refused(world.call("SubmitPrompts", instances=[bad, instance("b")]), INVALID)
    assert details.startswith(field), details
    assert (await world.stats()).submitted == 0
