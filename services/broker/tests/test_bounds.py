"""What is stored is bounded, and so is every answer: each field filled to its limit can be read back by every call."""

import grpc
import pytest
from conftest import serving
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2, experience_pb2
from world import EVALUATE, SERVE, TRAIN, World, group, instance, refused

from quartet_broker import keys
from quartet_broker.runs import complete
from quartet_broker.validation import MOST_BYTES

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# What has a rule of its own, which does not depend on its size: checked in test_runs, test_prompts, test_members.
CHOSEN = {
    "run_id", "instance_id", "prompt_id", "role", "evaluation_id", "traceparent", "event_id", "holder", "dtype",
    "shape", "address", "verifiers.name", "environment.name",
}  # fmt: skip


def nested(levels: int) -> Struct:
    """A Struct of so many levels, structs and lists in turns."""
    value: object = 1.0
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else [value]
    struct = Struct()
    struct.update({"a": value})
    return struct


def paths(descriptor, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all texts in a message; through repeated fields and maps, too."""
    found = []
    for field in descriptor.fields:
        path = (*above, field.name)
        if field.name in CHOSEN or ".".join(path[-2:]) in CHOSEN or field.name in above:
            continue
        if field.type in TEXTS:
            found.append(path)
        elif field.message_type and field.message_type.full_name not in ("google.protobuf.Struct", "quartet.v1.Tensor"):
            found += paths(field.message_type, path)
    return found


def put_text(message: Message, path: tuple[str, ...], size: int) -> None:
    """Put a text of `size` bytes at a path."""
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    value = bytes(size) if field.type == FieldDescriptor.TYPE_BYTES else "x" * size
    held = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
        held["x" * size if path[1] == "key" else "k"] = value_of_map(field, path, size)
    elif field.is_repeated:
        if len(path) == 1:
            held.append("x" * size)
        else:
            put_text(held.add(**ROLES.get(field.name, {})), path[1:], size)
    elif len(path) == 1:
        setattr(message, field.name, value)
    else:
        held.SetInParent()
        put_text(held, path[1:], size)


ROLES = {"messages": {"role": "user"}, "verifiers": {"name": "v"}}


def value_of_map(field: FieldDescriptor, path: tuple[str, ...], size: int) -> object:
    kind = field.message_type.fields_by_name["value"].type
    if kind not in TEXTS:
        return 1.0
    return "x" * size if path[1] == "value" else "v"


def filled(base: Message, path: tuple[str, ...], total: int) -> Message:
    """A message of `total` bytes, almost all of them in the text at a path."""
    size = total - base.ByteSize() - 64
    while True:
        message = type(base)()
        message.CopyFrom(base)
        put_text(message, path, size)
        if message.ByteSize() == total:
            return message
        size += total - message.ByteSize()


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


MEMBER = {"instance_id": "r2", "kind": common_pb2.SERVICE_KIND_ROLLOUT, "address": "h:1"}
# Nothing is left out that the broker would fill in: it is the whole that counts.
SPEC = complete(pb.RunSpec(run_id="b", sampling={"stop": ["x"], "bad_words": ["x"]}, environment={"name": "e"}))
# Of a prompt, which may be large, some; of the others each text.
LIMITS = [
    *((pb.Member(**MEMBER), path) for path in paths(pb.Member.DESCRIPTOR)),
    *((SPEC, path) for path in paths(pb.RunSpec.DESCRIPTOR)),
    *((pb.RunEvent(), path) for path in paths(pb.RunEvent.DESCRIPTOR) if path[0] != "run_state"),
    *(
        (instance("a"), path)
        for path in paths(experience_pb2.PromptInstance.DESCRIPTOR)
        if path[-1] in ("text", "output", "key")
    ),
]


@pytest.mark.parametrize(
    ("base", "path"), [pytest.param(*case, id=f"{type(case[0]).__name__}.{'.'.join(case[1])}") for case in LIMITS]
)
async def test_a_text_may_fill_its_message_to_the_limit_and_no_further(world, base, path):
    if not isinstance(base, pb.RunSpec):
        await world.create()
    else:
        world.run_id = base.run_id
    most = MOST_BYTES[type(base)]
    await refused(store(world, filled(base, path, most + 1)), INVALID, f"got {most + 1} bytes")
    await store(world, filled(base, path, most))
    assert (await world.run()).spec.run_id == world.run_id


@pytest.mark.parametrize("where", ["environment", "verifiers"])
async def test_structs_are_nested_sixteen_deep_at_most(world, where):
    def spec(levels: int) -> pb.RunSpec:
        parameters = nested(levels)
        if where == "environment":
            return pb.RunSpec(run_id=world.run_id, environment={"name": "e", "parameters": parameters})
        return pb.RunSpec(run_id=world.run_id, verifiers=[{"name": "v", "parameters": parameters}])

    def prompt(levels: int) -> experience_pb2.PromptInstance:
        parted = spec(levels)
        made = instance("a")
        made.prompt.environment.CopyFrom(parted.environment)
        made.prompt.verifiers.extend(parted.verifiers)
        return made

    for make in (spec, prompt):
        await refused(store(world, make(17)), INVALID, "parameters: got deeper nesting")
        await store(world, make(16))
    assert (await world.run()).spec.run_id == world.run_id


MESSAGE_BYTES = 4 << 20


def largest(name: str, **fields) -> experience_pb2.PromptInstance:
    return filled(instance(name, **fields), ("prompt", "metadata", "value"), MESSAGE_BYTES // 4)


async def test_every_call_answers_with_whatever_was_stored(redis_server, admin):
    """Runs, members, events, prompts, reasons: each as large as it may be, and together far beyond one message."""
    server = {"max_message_bytes": MESSAGE_BYTES}
    async with serving(redis_server.url, server=server, max_event_bytes=MESSAGE_BYTES) as (stub, _, _):
        world = World(stub, admin, "full")
        specs = [pb.RunSpec(run_id=f"full-{n}", environment={"name": "e"}) for n in range(30)]
        for spec in (pb.RunSpec(run_id="full", groups_per_step=4, max_deliveries=40), *specs):
            await store(world, filled(complete(spec), ("system_prompt",), MOST_BYTES[pb.RunSpec]))
        await world.register("r1")
        for n in range(127):
            member = pb.Member(**MEMBER | {"instance_id": f"m{n}"})
            await store(world, filled(member, ("waiting_for",), MOST_BYTES[pb.Member]))
        for n in range(4):
            await store(world, largest(f"d{n}"))
            await store(world, largest(f"s{n}", purpose=SERVE))
            of_a_set = largest(f"e{n}", purpose=EVALUATE)
            await world.call("SubmitPrompts", instances=[of_a_set], evaluation_set="set")
        for _ in range(30):
            await store(world, filled(pb.RunEvent(), ("notice", "text"), MOST_BYTES[pb.RunEvent]))
        await world.start_evaluation(0, "set")

        # As many are granted as fit: each is answered, and none but those is held.
        leases = [lease for _ in range(12) for lease in await world.lease()]
        assert len(leases) == 12
        for lease in leases:
            if lease.instance.instance_id.startswith("d"):
                await world.release(lease.lease_id, "because " * 1000, permanent=True)
            else:
                assert await world.put(group(lease)) == ["ACCEPTED"]

        methods = pb.DESCRIPTOR.services_by_name["BrokerService"].methods
        answered = {method.name: await answers(world, method.name) for method in methods if method.name not in WRITES}
    assert [run.spec.run_id for answer in answered["ListRuns"] for run in answer.runs] == [
        *(spec.run_id for spec in reversed(specs)), "full",
    ]  # fmt: skip
    assert [d.instance.instance_id for answer in answered["ListDead"] for d in answer.dead] == ["d0", "d1", "d2", "d3"]
    assert {len(d.reasons[0]) for answer in answered["ListDead"] for d in answer.dead} == {2000}
    assert len(answered["GetRun"][0].members) == 128 == len(answered["WatchMembers"][0].members)
    assert 10 < len(answered["WatchRun"]) < 20, "the oldest events went"
    assert len(answered["CollectResults"]) == 4
    assert answered["GetEvaluation"][0].complete


WRITES = {
    "CreateRun", "FinishRun", "DeleteRun", "SubmitPrompts", "EndPrompts", "LeasePrompts", "RenewLeases",
    "ReleaseLeases", "GetUnscored", "PutExperience", "OpenSession", "SettleTrained", "LeaseExperience",
    "DropExperience", "MarkTrained", "Commit", "RegisterMember", "Heartbeat", "LeaveMember", "StartEvaluation",
    "ReportProgress", "RequeueDead",
}  # fmt: skip


async def answers(world, method: str) -> list:
    """All that a reading call says of the run, page by page."""
    request = getattr(pb, f"{method}Request")()
    more = {
        "GetEvaluation": {"evaluation_id": "set@0", "summary_only": True},
        "CollectResults": {"instance_ids": ["s0", "s1", "d0", "d1"]},
        "GetGroup": {"instance_id": "d0"},
    }.get(method, {})
    if method != "ListRuns":
        request = type(request)(run_id=world.run_id, **more)
    call, got = getattr(world.stub, method), []
    if method in ("CollectResults", "AuditRun"):
        return [answer async for answer in call(request, timeout=30)]
    if method in ("WatchRun", "WatchMembers"):
        stream = call(request, timeout=30)
        newest = (await world.redis.xrevrange(keys.prefix(world.run_id) + "events", count=1))[0][0].decode()
        while not got or (method == "WatchRun" and got[-1].event.event_id != newest):
            got.append(await stream.read())
        stream.cancel()
        return got
    while not got or getattr(got[-1], "next_page_token", ""):
        if got:
            request.page_token = got[-1].next_page_token
        got.append(await call(request, timeout=30))
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
    await World(world.stub, world.redis, world.run_id + "-newer").create()
    page = await world.stub.ListRuns(pb.ListRunsRequest(limit=1))
    behind = await world.stub.ListRuns(pb.ListRunsRequest(limit=1, page_token=page.next_page_token))
    assert [run.spec.run_id for run in (*page.runs, *behind.runs)] == [world.run_id + "-newer", world.run_id]
    for call in (
        world.call("ListDead", page_token="yesterday:x"),
        world.stub.ListRuns(pb.ListRunsRequest(page_token="yesterday:x")),
    ):
        await refused(call, INVALID, "page_token")


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE, SERVE])
async def test_prompts_are_kept_up_to_a_number_of_bytes_and_settled_ones_do_not_count(redis_server, admin, purpose):
    async with serving(redis_server.url, max_prompt_bytes=1 << 20) as (stub, _, _):
        world = World(stub, admin, "prompts")
        await world.create(groups_per_step=1)
        what = {"text": "x" * 500_000, "purpose": purpose, "evaluation_set": "set" if purpose == EVALUATE else ""}
        await world.submit("a", **what)
        await world.submit("b", **what)
        await refused(world.submit("c", **what), EXHAUSTED, "broker.max_prompt_bytes")
        if purpose == EVALUATE:
            await world.start_evaluation(0, "set")
            await refused(world.start_evaluation(1, "set"), EXHAUSTED, "broker.max_prompt_bytes")
            await world.roll_out()
            await world.start_evaluation(1, "set")
        else:
            await world.open()
            await world.roll_out()
            if purpose == TRAIN:
                await world.train(0)
                await world.commit(1)
            await world.submit("c", **what)
        assert not await world.faults()


async def test_long_prompts_for_which_there_is_no_room_are_not_sent_to_redis(redis_server, admin):
    async with serving(redis_server.url, max_prompt_bytes=4 << 20) as (stub, _, _):
        world = World(stub, admin, "long")
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


async def test_there_are_so_many_runs_and_no_more(redis_server, admin):
    async with serving(redis_server.url, max_runs=2) as (stub, _, _):
        for run_id in ("one", "two", "two"):
            await World(stub, admin, run_id).create()
        await refused(World(stub, admin, "three").create(), EXHAUSTED, "broker.max_runs")
        await World(stub, admin, "one").delete(force=True)
        await World(stub, admin, "three").create()


async def test_a_run_has_a_limit_of_members_and_says_so(redis_server, admin):
    async with serving(redis_server.url, max_members=2) as (stub, _, _):
        world = World(stub, admin, "crowded")
        await world.create(members=("m1", "m2"))
        await refused(world.register("m3"), EXHAUSTED, "broker.max_members")
        await world.register("m1")
