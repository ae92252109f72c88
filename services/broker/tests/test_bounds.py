"""What is stored is bounded, and so is every answer: each field filled to its limit can be read back by every call."""

import functools

import grpc
import pytest
from google.protobuf.message import Message
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2, experience_pb2
from world import EVALUATE, SERVE, TRAIN, World, group, instance, refused

from quartet_broker import keys
from quartet_broker.runs import complete
from quartet_broker.validation import MOST_BYTES, MOST_CONSUMED_IDS, MOST_IDS

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
MEMBER = {"instance_id": "r2", "kind": common_pb2.SERVICE_KIND_ROLLOUT, "address": "h:1"}


def member(text: str, name: str = "r2") -> pb.Member:
    return pb.Member(**MEMBER | {"instance_id": name}, waiting_for=text)


def spec(text: str, run_id: str = "b") -> pb.RunSpec:
    # Nothing is left out that the broker would fill in: it is the whole that counts.
    return complete(pb.RunSpec(run_id=run_id, system_prompt=text, environment={"name": "e"}))


def event(text: str) -> pb.RunEvent:
    return pb.RunEvent(notice={"text": text})


def prompt(text: str, name: str = "a", **fields) -> experience_pb2.PromptInstance:
    made = instance(name, **fields)
    made.prompt.metadata["k"] = text
    return made


def filled(make, total: int) -> Message:
    """A message of `total` bytes, almost all of them in its text."""
    size = total - 500
    while (message := make("x" * size)).ByteSize() != total:
        size += total - message.ByteSize()
    return message


def store(world, message: Message):
    """The call that stores a message."""
    match message:
        case pb.RunSpec():
            return world.stub.CreateRun(pb.CreateRunRequest(spec=message))
        case experience_pb2.PromptInstance():
            return world.call("SubmitPrompts", instances=[message])
        case pb.Member():
            return world.call("RegisterMember", member=message)
        case pb.RunEvent():
            return world.call("ReportProgress", event=message)
    raise AssertionError(message)


@pytest.mark.parametrize("make", [member, spec, event, prompt])
async def test_a_text_may_fill_its_message_to_the_limit_and_no_further(world, make):
    await world.create()
    most = MOST_BYTES[type(make(""))]
    await refused(store(world, filled(make, most + 1)), INVALID, f"got {most + 1} bytes")
    await store(world, filled(make, most))
    assert (await world.run()).spec.run_id == world.run_id


async def test_structs_are_nested_sixteen_deep_at_most(world):
    def nested(levels: int) -> pb.RunSpec:
        value: object = 1.0
        for level in range(levels - 1):
            value = {"a": value} if level % 2 else [value]
        return pb.RunSpec(run_id=world.run_id, verifiers=[{"name": "v", "parameters": {"a": value}}])

    await refused(store(world, nested(17)), INVALID, "parameters: got deeper nesting")
    await store(world, nested(16))
    assert (await world.run()).spec.run_id == world.run_id


MESSAGE_BYTES = 4 << 20


@pytest.mark.broker(server={"max_message_bytes": MESSAGE_BYTES}, max_event_bytes=MESSAGE_BYTES)
async def test_every_call_answers_with_whatever_was_stored(world):
    """Runs, members, events, prompts, reasons: each as large as it may be, and together far beyond one message."""
    await world.create(groups_per_step=4, max_deliveries=40)
    others = [f"full-{n}" for n in range(30)]
    for name in others:
        await store(world, filled(functools.partial(spec, run_id=name), MOST_BYTES[pb.RunSpec]))
    for n in range(127):
        await store(world, filled(functools.partial(member, name=f"m{n}"), MOST_BYTES[pb.Member]))
    for name in (f"{kind}{n}" for n in range(4) for kind in "dse"):
        fields = {"s": {"purpose": SERVE}, "e": {"purpose": EVALUATE}}.get(name[0], {})
        large = filled(functools.partial(prompt, name=name, **fields), MESSAGE_BYTES // 4)
        await world.call("SubmitPrompts", instances=[large], evaluation_set="set" if name[0] == "e" else "")
    for _ in range(30):
        await store(world, filled(event, MOST_BYTES[pb.RunEvent]))
    await world.start_evaluation(0, "set")

    # As many are granted as fit: each is answered, and none but those is held.
    leases = [lease for _ in range(12) for lease in await world.lease()]
    assert len(leases) == 12
    for lease in leases:
        if lease.instance.instance_id.startswith("d"):
            await world.release(lease.lease_id, "because " * 1000, permanent=True)
        else:
            assert await world.put(group(lease)) == ["ACCEPTED"]

    listed = await pages(world.stub.ListRuns, pb.ListRunsRequest())
    names = [run.spec.run_id for page in listed for run in page.runs]  # newest first; behind them those of other tests
    assert names[:31] == [*reversed(others), world.run_id]
    listed = await pages(world.stub.ListDead, pb.ListDeadRequest(run_id=world.run_id))
    dead = [each for page in listed for each in page.dead]
    assert [each.instance.instance_id for each in dead] == ["d0", "d1", "d2", "d3"]
    assert {len(each.reasons[0]) for each in dead} == {2000}
    assert len((await world.call("GetRun")).members) == 128
    watching = world.call("WatchMembers")
    assert len((await watching.read()).members) == 128
    watching.cancel()
    results = [answer async for answer in world.call("CollectResults", instance_ids=["s0", "s1", "d0", "d1"])]
    assert len(results) == 4
    assert (await world.call("GetEvaluation", evaluation_id="set@0", summary_only=True)).complete
    assert (await world.call("GetGroup", instance_id="d0")).state == pb.GROUP_STATE_DEAD
    assert not await world.faults()
    await world.finish()
    assert 10 < len([answer async for answer in world.watch()]) < 25, "the oldest events went"


async def pages(call, request: Message) -> list:
    """All that a call lists, page by page."""
    got = [await call(request)]
    while got[-1].next_page_token:
        request.page_token = got[-1].next_page_token
        got.append(await call(request))
    return got


async def test_what_an_older_broker_stored_beyond_the_bounds_is_still_read(world):
    await world.create(groups_per_step=3)
    await world.submit("a", "b", "c")
    huge = instance("b", "x" * (40 << 20))
    await world.redis.hset(keys.prefix(world.run_id) + "i:b", "prompt", huge.SerializeToString())
    assert [await world.names() for _ in range(3)] == [["a"], ["b"], ["c"]]


async def test_reasons_are_kept_of_the_last_failures(world):
    await world.create(max_deliveries=30)
    await world.submit("a")
    for n in range(1, 31):
        (lease,) = await world.lease()
        await world.release(lease.lease_id, f"reason {n}")
    (dead,) = (await world.call("ListDead")).dead
    assert list(dead.reasons) == [f"reason {n}" for n in range(11, 31)] and dead.attempts == 30
    await world.requeue_dead()
    fields = await world.redis.hkeys(keys.prefix(world.run_id) + "i:a")
    assert not [field for field in fields if field.startswith(b"reason")]


async def test_a_page_has_no_more_than_was_asked_for_and_the_next_goes_on_behind_it(world):
    await world.create()
    await world.submit("a", "b", "c")
    while leases := await world.lease():
        for lease in leases:
            await world.release(lease.lease_id, "bad", permanent=True)
    first = await world.call("ListDead", limit=2)
    second = await world.call("ListDead", limit=2, page_token=first.next_page_token)
    assert [[dead.instance.instance_id for dead in page.dead] for page in (first, second)] == [["a", "b"], ["c"]]
    assert not second.next_page_token
    await world.redis.delete(keys.prefix(world.run_id) + "i:a")  # as if it was requeued while the page was made
    assert (await world.call("ListDead", limit=1)).next_page_token == first.next_page_token
    await World(world.stub, world.redis, world.run_id + "-newer").create()
    page = await world.stub.ListRuns(pb.ListRunsRequest(limit=1))
    behind = await world.stub.ListRuns(pb.ListRunsRequest(limit=1, page_token=page.next_page_token))
    assert [run.spec.run_id for run in (*page.runs, *behind.runs)] == [world.run_id + "-newer", world.run_id]
    for call in (
        world.call("ListDead", page_token="yesterday:x"),
        world.call("ListDead", page_token="nan:x"),
        world.stub.ListRuns(pb.ListRunsRequest(page_token="yesterday:x")),
    ):
        await refused(call, INVALID, "page_token")


@pytest.mark.broker(max_prompt_bytes=1 << 20)
@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE, SERVE])
async def test_prompts_are_kept_up_to_a_number_of_bytes_and_settled_ones_do_not_count(world, purpose):
    await world.create(groups_per_step=1)
    what = {"text": "x" * 500_000, "purpose": purpose, "evaluation_set": "set" if purpose == EVALUATE else ""}
    await world.submit("a", **what)
    await world.submit("b", **what)
    await refused(world.submit("c", **what), EXHAUSTED, "broker.max_prompt_bytes")
    if purpose == EVALUATE:
        await world.start_evaluation(0, "set")
        await refused(world.start_evaluation(1, "set"), EXHAUSTED, "broker.max_prompt_bytes")
        await world.generate()
        await world.start_evaluation(1, "set")
    else:
        await world.open()
        await world.generate()
        if purpose == TRAIN:
            await world.train(0)
            await world.commit(1)
        await world.submit("c", **what)
    assert not await world.faults()


@pytest.mark.broker(max_prompt_bytes=4 << 20)
async def test_long_prompts_for_which_there_is_no_room_are_not_sent_to_redis(world, admin):
    await world.create()

    async def received() -> int:
        return (await admin.info("stats"))["total_net_input_bytes"]

    before = await received()
    await world.submit("a", text="x" * (3 << 20))
    assert await received() - before > 3 << 20
    await refused(world.submit("b", text="x" * (3 << 20)), EXHAUSTED, "broker.max_prompt_bytes")
    await refused(world.submit("a", text="y" * (3 << 20)), grpc.StatusCode.ALREADY_EXISTS, "'a'")
    assert (await world.submit("a", text="x" * (3 << 20))).duplicates == 1
    assert await received() - before < 7 << 20
    assert not await world.faults()


@pytest.mark.broker(max_runs=2, max_members=2)
async def test_runs_and_members_are_bounded_and_whoever_is_there_may_come_again(broker, admin):
    one, two, three = (World(broker[0], admin, run_id) for run_id in ("one", "two", "three"))
    for world in (one, two, two):
        await world.create(members=("m1", "m2"))
    await refused(three.create(), EXHAUSTED, "broker.max_runs")
    await one.delete(force=True)
    await three.create()
    await refused(two.register("m3"), EXHAUSTED, "broker.max_members")
    await two.register("m1")


async def test_a_batch_may_have_more_groups_than_a_command_has_arguments(world):
    await world.create(groups_per_step=9_000, max_queued_prompts=9_000)
    for start in range(0, 9_000, 1_000):
        await world.submit(*(str(n) for n in range(start, start + 1_000)))
    while await world.generate(250):
        pass
    await world.open()
    assert len(await world.train(0)) == await world.commit(1) == 9_000


@pytest.mark.parametrize(
    ("method", "field", "most"),
    [
        ("OpenSession", "consumed_instance_ids", MOST_CONSUMED_IDS),
        ("DropExperience", "instance_ids", MOST_IDS),
        ("MarkTrained", "instance_ids", MOST_IDS),
        ("SettleTrained", "steps[0].instance_ids", MOST_IDS),
        ("RequeueDead", "instance_ids", MOST_IDS),
        ("RenewLeases", "lease_ids", MOST_IDS),
    ],
)
async def test_ids_in_a_request_are_bounded(world, method, field, most):
    await world.create()
    await world.open()
    ids = ["x"] * (most + 1)
    fields = {"steps": [{"instance_ids": ids}]} if method == "SettleTrained" else {field: ids}
    fields |= {"holder": "t1"} if method == "OpenSession" else {}
    told = await refused(world.call(method, **fields), INVALID)
    assert told.startswith(f"{field}: got {most + 1} items; allowed: ")


async def test_many_groups_are_dropped_in_portions(world):
    """Redis cannot be asked anything while a script runs: a batch's groups are not dropped in one."""
    await world.create(groups_per_step=1_000, max_queued_prompts=2_000)
    await world.submit(*(f"a{n}" for n in range(1_000)))
    while await world.generate(250):
        pass
    await world.open()
    ids = await world.batch(0)
    scripts = await calls_of_scripts(world)
    unknown = [f"unknown-{n}" for n in range(1_000)]
    assert await world.drop(0, *ids[:990], *unknown, *ids[:5]) == 990
    assert await calls_of_scripts(world) - scripts >= 8
    manifest, _ = await world.take(0)
    assert not manifest.granted and manifest.needed == 990
    await world.submit(*(f"b{n}" for n in range(990)))
    while await world.generate(250):
        pass
    assert (await world.batch(0))[:10] == ids[990:]
    assert not await world.faults()


async def calls_of_scripts(world) -> int:
    return (await world.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
