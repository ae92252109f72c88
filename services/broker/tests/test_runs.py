"""Runs: making, defaults, differences, deletion; what callers may not send."""

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from world import EVALUATE, SERVE, instance

from quartet_common.durations import to_duration


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_a_spec_is_stored_with_its_defaults(world):
    response = await world.stub.CreateRun(pb.CreateRunRequest(spec=pb.RunSpec(run_id=world.run_id)))
    spec = response.run.spec
    assert response.created and response.run.state == pb.RUN_STATE_ACTIVE
    assert (spec.group_size, spec.groups_per_step, spec.max_staleness, spec.max_deliveries) == (8, 16, 4, 5)
    assert (spec.max_queued_prompts, spec.max_experience_bytes) == (4096, 1 << 30)
    assert (spec.prompt_lease_ttl.seconds, spec.member_ttl.seconds, spec.result_ttl.seconds) == (60, 15, 3600)
    assert (spec.lease_order, spec.partial_batch) == (pb.LEASE_ORDER_FIFO, pb.PARTIAL_BATCH_POLICY_DROP)
    assert (spec.sampling.n, spec.sampling.temperature, spec.evaluation_sampling.n) == (8, 1.0, 1)


async def test_making_a_run_again_confirms_it_and_another_spec_is_refused(world):
    await world.create(group_size=4)
    again = await world.stub.CreateRun(
        pb.CreateRunRequest(
            spec=pb.RunSpec(run_id=world.run_id, group_size=4, groups_per_step=2, max_staleness=0, max_deliveries=3)
        )
    )
    assert not again.created
    code, details = await refusal(world.create(group_size=5))
    assert code == grpc.StatusCode.ALREADY_EXISTS and "group_size is 4, asked for 5" in details


async def test_runs_are_listed_newest_first(world):
    await world.create()
    runs = (await world.stub.ListRuns(pb.ListRunsRequest())).runs
    assert runs[0].spec.run_id == world.run_id


async def test_the_first_outcome_stands(world):
    await world.create()
    await world.finish(pb.RUN_STATE_FAILED, "first")
    run = (await world.finish(pb.RUN_STATE_SUCCEEDED, "second")).run
    assert (run.state, run.reason) == (pb.RUN_STATE_FAILED, "first")
    code, _ = await refusal(world.submit("a"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_deleted_run_leaves_nothing(world):
    await world.create()
    await world.submit("e", purpose=EVALUATE, evaluation_set="heldout")
    await world.submit("s", "t", purpose=SERVE)
    await world.submit(*"abc")
    await world.roll_out()
    code, details = await refusal(world.stub.DeleteRun(pb.DeleteRunRequest(run_id=world.run_id)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "active" in details
    assert (await world.stub.DeleteRun(pb.DeleteRunRequest(run_id=world.run_id, force=True))).deleted
    assert [key async for key in world.redis.scan_iter(match=f"q:{{{world.run_id}}}:*")] == []
    assert not (await world.stub.DeleteRun(pb.DeleteRunRequest(run_id=world.run_id))).deleted
    code, details = await refusal(world.run())
    assert code == grpc.StatusCode.NOT_FOUND and world.run_id in details
    await world.create()
    assert (await world.stats()).submitted == 0


async def test_a_half_deleted_run_does_not_exist_and_the_sweeper_finishes_the_work(world):
    await world.create()
    await world.redis.hset(f"q:{{{world.run_id}}}:run", "state", "DELETING")
    code, _ = await refusal(world.run())
    assert code == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"run_id": ""}, "spec.run_id"),
        ({"run_id": "no spaces"}, "spec.run_id"),
        ({"run_id": "x{y}"}, "spec.run_id"),
        ({"group_size": -1}, "spec.group_size"),
        ({"group_size": 1025}, "spec.group_size"),
        ({"max_staleness": -1}, "spec.max_staleness"),
        ({"max_queued_prompts": -5}, "spec.max_queued_prompts"),
        ({"max_experience_bytes": 2**60}, "spec.max_experience_bytes"),
        ({"lease_order": 17}, "spec.lease_order"),
        ({"prompt_lease_ttl": to_duration(-1)}, "spec.prompt_lease_ttl"),
        ({"sampling": experience_pb2.SamplingParams(temperature=-1)}, "spec.sampling.temperature"),
        ({"sampling": experience_pb2.SamplingParams(top_p=0)}, "spec.sampling.top_p"),
    ],
)
async def test_bad_specs_are_refused_by_field(world, spec, field):
    code, details = await refusal(
        world.stub.CreateRun(pb.CreateRunRequest(spec=pb.RunSpec(**({"run_id": world.run_id} | spec))))
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith(field), details


def _chat(role: str) -> experience_pb2.Prompt:
    return experience_pb2.Prompt(
        chat=experience_pb2.Chat(messages=[experience_pb2.Message(role=role, content="hello")])
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instance_id": ""}, "instances[0].instance_id"),
        ({"instance_id": "x" * 257}, "instances[0].instance_id"),
        ({"purpose": 0}, "instances[0].purpose"),
        ({"purpose": 99}, "instances[0].purpose"),
        ({"purpose": EVALUATE}, "evaluation_set"),
        ({"pinned_version": 3}, "instances[0].pinned_version"),
        ({"evaluation_id": "x@1"}, "instances[0].evaluation_id"),
        ({"data_pass": -1}, "instances[0].data_pass"),
        ({"prompt": experience_pb2.Prompt()}, "instances[0].prompt.input"),
        ({"prompt": _chat("robot")}, "instances[0].prompt.chat.messages[0].role"),
        ({"prompt": experience_pb2.Prompt(chat=experience_pb2.Chat())}, "instances[0].prompt.chat.messages"),
    ],
)
async def test_bad_prompts_are_refused_by_field_and_nothing_is_queued(world, changes, field):
    await world.create()
    fields = {"instance_id": "a", "purpose": 1, "prompt": instance("a").prompt} | changes
    bad = experience_pb2.PromptInstance(**fields)
    code, details = await refusal(
        world.stub.SubmitPrompts(pb.SubmitPromptsRequest(run_id=world.run_id, instances=[bad, instance("b")]))
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith(field), details
    assert (await world.stats()).submitted == 0


async def test_bad_numbers_are_refused(world):
    await world.create()
    for call in (
        world.ask(most=0),
        world.ask(most=1025),
        world.ask(wait=31),
        world.ask(wait=-1),
        world.ask(holder=""),
        world.take(-1),
        world.open(checkpoint=2**62),
    ):
        code, _ = await refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_every_call_names_a_run_that_does_not_exist(world):
    for call in (
        world.submit("a"),
        world.ask(),
        world.open(),
        world.take(0),
        world.trained(0),
        world.commit(0),
        world.drop(0, "a"),
        world.register("r1"),
        world.finish(),
        world.run(),
        world.state_of("a"),
        world.end_prompts(),
        world.release("x-1:a"),
        world.stub.ListDead(pb.ListDeadRequest(run_id=world.run_id)),
        world.stub.RequeueDead(pb.RequeueDeadRequest(run_id=world.run_id)),
        world.stub.WatchRun(pb.WatchRunRequest(run_id=world.run_id)).read(),
        world.stub.WatchMembers(pb.WatchMembersRequest(run_id=world.run_id)).read(),
        world.stub.CollectResults(pb.CollectResultsRequest(run_id=world.run_id, instance_ids=["a"])).read(),
    ):
        code, details = await refusal(call)
        assert code == grpc.StatusCode.NOT_FOUND and world.run_id in details
