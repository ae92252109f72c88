"""Whose something is: over mTLS, every RPC called with each certificate, about what is its holder's or another's."""

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import pytest_asyncio
from conftest import serving
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc, common_pb2
from world import EVALUATE, World, group, instance, refused

from quartet_client.authority import create_authority, export, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.identity import allowed_roles

pytestmark = pytest.mark.asyncio(loop_scope="module")

DENIED, INVALID = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
ROLLOUT, TRAINER = common_pb2.SERVICE_KIND_ROLLOUT, common_pb2.SERVICE_KIND_TRAINER
# Certificates by holder: common name, role, a host besides 127.0.0.1. The last is what a renewal makes of the first.
CERTIFICATES = {
    "gpu7": ("gpu7", "rollout", "gpu7.example"),
    "gpu8": ("gpu8", "rollout", "*.pool.example"),
    "trainer": ("trainer", "trainer", "trainer.example"),
    "trainer2": ("trainer2", "trainer", "trainer2.example"),
    "alice": ("alice", "client", "a.example"),
    "bob": ("bob", "client", "b.example"),
    "reward": ("reward", "reward", "r.example"),
    "operator": ("operator", "operator", "o.example"),
    "renewed": ("gpu7", "rollout", "gpu7.example"),
}
ROLLOUTS, TRAINERS = {"gpu7", "gpu8"}, {"trainer", "trainer2"}
# Alice made the run, gpu7 is its member r1, trainer its member t1 and has its session. Who gets through each RPC about
# what belongs to them; the operator always does. Through the others gets whoever has a role that may call them.
OWNERS = {
    "FinishRun": {"alice", "trainer"},
    **dict.fromkeys(("DeleteRun", "EndPrompts"), {"alice"}),
    **dict.fromkeys(("LeasePrompts", "RegisterMember", "Heartbeat", "LeaveMember"), {"gpu7"}),
    **dict.fromkeys(("OpenSession", "SettleTrained", "LeaseExperience", "DropExperience"), {"trainer"}),
    **dict.fromkeys(("MarkTrained", "Commit", "ReportProgress"), {"trainer"}),
}
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["BrokerService"].methods]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with one for each holder."""
    folder = tmp_path_factory.mktemp("identities")
    create_authority(folder / "ca")
    for holder, (name, role, host) in {"broker": ("broker", "broker", "127.0.0.1"), **CERTIFICATES}.items():
        issue(folder / "ca", name, [role], [host])
        export(folder / "ca", name, folder / holder)
    return folder


def security(authority: Path, holder: str) -> SecuritySection:
    ca, certificate, key = (authority / holder / file for file in ("ca.crt", "tls.crt", "tls.key"))
    return SecuritySection(tls_ca=ca, tls_certificate=certificate, tls_key=key)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stubs(redis_servers, authority):
    """A stub of one broker for each certificate; `open` is of a broker without TLS over the same Redis."""
    async with contextlib.AsyncExitStack() as stack:
        limits: dict = {"max_members": 6, "max_caller_share": 0.5, "max_prompt_bytes": 1 << 20}
        url = redis_servers("redis").url
        _, _, host = await stack.enter_async_context(serving(url, security=security(authority, "broker"), **limits))
        found = {"open": (await stack.enter_async_context(serving(url)))[0]}
        for file in CERTIFICATES:
            channel = await stack.enter_async_context(
                connect(host.address, security(authority, file), service="broker")
            )
            found[file] = broker_pb2_grpc.BrokerServiceStub(channel)
        yield found


def new_run(stubs) -> SimpleNamespace:
    """A run that is not made yet, as each sees it: run.alice, run.gpu7, ..."""
    name = f"identities-{next(_numbers)}"
    return SimpleNamespace(**{file: World(stub, None, name) for file, stub in stubs.items()}, id=name)


@pytest_asyncio.fixture(loop_scope="module")
async def run(stubs):
    """A run of alice's; r1 is gpu7's, t1 trainer's, who has the session."""
    made = new_run(stubs)
    await made.alice.create(members=())
    await made.gpu7.register("r1")
    await made.trainer.open(holder="t1")
    await made.trainer.register("t1", kind=TRAINER)
    await made.alice.submit("a", "b")
    await made.alice.submit("e", purpose=EVALUATE, evaluation_set="set")
    return made


def request(method: str, run: str, session: int):
    """A request about the run, and what belongs to somebody in it."""
    made = getattr(pb, f"{method}Request")()
    fields = {field.name for field in made.DESCRIPTOR.fields}
    rollout = {"instance_id": "r1", "kind": ROLLOUT, "address": "127.0.0.1:1", "state": pb.MEMBER_STATE_ACTIVE}
    values = {
        "run_id": run, "spec": pb.RunSpec(run_id=run, groups_per_step=2, max_deliveries=3), "max_prompts": 1,
        "holder": "t1" if method == "OpenSession" else "r1", "session_epoch": session, "member": rollout,
        "instance_id": "r1" if method == "LeaveMember" else "a", "evaluation_set": "set", "evaluation_id": "set@0",
        "state": pb.RUN_STATE_CANCELLED, "force": True,
        "instance_ids": [] if method == "CollectResults" else ["a"],  # it would wait for them
        "event": {"step": {"step": 0, "policy_version": 1}}, "steps": [{"step": 0, "instance_ids": ["a"]}],
    }  # fmt: skip
    if method == "SubmitPrompts":
        values |= {"instances": [instance("c")], "evaluation_set": ""}
    return type(made)(**{name: value for name, value in values.items() if name in fields})


async def code_of(stub, method: str, message) -> grpc.StatusCode:
    call = getattr(stub, method)(message, timeout=20)
    try:
        if hasattr(call, "read"):
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
async def test_only_owner_and_allowed_roles_get_through(stubs, run, method):
    message = request(method, run.id, run.trainer.session)
    allowed = allowed_roles(f"/quartet.v1.BrokerService/{method}")
    may = OWNERS.get(method, {who for who, (_, role, _) in CERTIFICATES.items() if role in allowed})
    may |= {"operator", "open"} | ({"renewed"} if "gpu7" in may else set())
    callers = sorted((*CERTIFICATES, "open"), key=lambda who: who in may)
    assert {who for who in callers if await code_of(stubs[who], method, message) != DENIED} == may


async def test_lease_is_denied_to_other_identities(run):
    await run.gpu8.register("r2")
    (mine,), (theirs,) = await run.gpu7.lease(1), await run.gpu8.lease(1, holder="r2")
    assert list((await run.gpu8.renew(mine.lease_id, theirs.lease_id)).lost) == [mine.lease_id]
    assert list((await run.gpu8.release(mine.lease_id, "no")).lost) == [mine.lease_id]
    assert await run.gpu8.put(group(mine), group(theirs)) == ["LEASE_LOST", "ACCEPTED"]
    assert await run.gpu7.put(group(mine)) == ["ACCEPTED"]


async def test_an_id_is_free_again_when_its_member_has_left_and_a_renewed_certificate_is_the_same(run):
    await refused(run.gpu8.register("r1"), DENIED, "certificate 'gpu7', the caller's is 'gpu8'")
    await run.renewed.register("r1")
    (lease,) = await run.renewed.lease(1)
    assert await run.gpu7.put(group(lease)) == ["ACCEPTED"]
    await run.gpu7.leave("r1")
    await run.gpu8.register("r1")
    await refused(run.gpu7.register("r1"), DENIED)


async def test_another_trainer_takes_over_when_the_one_before_is_gone(run):
    await refused(run.trainer2.open(holder="t2"), DENIED, "session")
    await run.trainer.leave("t1")
    await run.trainer2.open(holder="t2")
    await refused(run.trainer.trained(0), DENIED)
    await refused(run.trainer.finish(), DENIED)
    finished = await run.trainer2.finish()
    assert (finished.made_by, finished.trained_by) == ("alice", "trainer2")


async def test_a_member_is_of_the_kind_of_its_role(run):
    for who, kind in itertools.product(("gpu8", "trainer2"), (ROLLOUT, TRAINER)):
        registered = getattr(run, who).register(f"{who}-{kind}", kind=kind)
        if (kind == ROLLOUT) == (who == "gpu8"):
            await registered
        else:
            await refused(registered, DENIED, "member.kind")


REPORTERS = {
    "step": {"trainer"},
    "member": set(),
    "notice": ROLLOUTS | TRAINERS,
    "notice of r1": {"gpu7"},
    "notice of the broker": set(),
}


@pytest.mark.parametrize(("said", "reporters"), REPORTERS.items(), ids=REPORTERS)
async def test_who_reports_an_event(run, said, reporters):
    kind, _, source = said.partition(" of ")
    fields = {"source": source.removeprefix("the ")} if source else {}
    message = pb.ReportProgressRequest(run_id=run.id, event={kind: fields})
    callers = ROLLOUTS | TRAINERS | {"operator"}
    through = {who for who in callers if await code_of(getattr(run, who).stub, "ReportProgress", message) != DENIED}
    assert through == reporters | {"operator"}


@pytest.mark.parametrize(
    ("who", "address", "code"),
    [
        ("gpu7", "gpu7.example:7103", None),
        ("gpu7", "127.0.0.1:7103", None),
        ("gpu8", "a.pool.example:7103", None),
        ("gpu8", "a.b.pool.example:7103", DENIED),
        ("gpu8", "gpu7.example:7103", DENIED),
        ("operator", "gpu7.example:7103", None),
        ("open", "anything_1.example:7103", None),
        ("open", "[fe80::1]:7103", None),
        ("gpu7", "dns:///gpu7.example:7103", INVALID),
        ("open", "unix:/tmp/x:1", INVALID),
        ("open", "user@gpu7.example:70000", INVALID),
    ],
)  # fmt: skip
async def test_an_address_is_at_a_host_that_the_certificate_names(run, who, address, code):
    registered = getattr(run, who).register("r-new", address=address)
    if code is None:
        await registered
    else:
        await refused(registered, code, "member.address")


async def test_what_was_made_without_a_certificate_is_everyones(stubs):
    run = new_run(stubs)
    await run.open.create(members=("r1",))
    await run.gpu8.register("r1")
    await run.bob.end_prompts()
    assert await run.bob.delete(force=True)


async def test_a_guest_has_its_share_of_a_runs_prompts_and_who_made_it_all(stubs):
    run = new_run(stubs)
    await run.alice.create(members=(), max_queued_prompts=10)
    await run.bob.submit("b0", "b1", "b2", "b3")
    said = await refused(run.bob.submit("b4", "b5"), EXHAUSTED, "'bob' holds 4 and may hold at most 5")
    assert said.startswith(f"prompts of run '{run.id}'")
    await run.bob.submit("b3", "b4")  # one of them is there
    await run.alice.submit(*(f"a{n}" for n in range(5)))
    # What is settled is given back.
    await run.gpu7.register("r1")
    await run.trainer.open(holder="t1")
    await run.gpu7.generate(2)
    await run.trainer.batch(0)
    assert await run.trainer.drop(0, "b0", "b1") == 2
    await run.bob.submit("b5", "b6")


async def test_a_guest_has_its_share_of_the_bytes(run):
    await run.bob.submit("g0", text="x" * 300_000)
    await refused(run.bob.submit("g1", text="x" * 300_000), EXHAUSTED, "bytes of prompts of run")
    await run.alice.submit("g1", text="x" * 300_000)


async def test_a_certificate_has_its_share_of_the_members(run):
    for name in ("r2", "r3"):
        await run.gpu7.register(name)
    said = await refused(run.renewed.register("r4"), EXHAUSTED, "(broker.max_caller_share)")
    assert said.startswith("members of run")
    await run.gpu7.register("r3")  # it is there
    await run.gpu8.register("r4")
    await run.gpu7.leave("r2")
    await run.gpu7.register("r5")


async def test_a_certificate_has_its_share_of_the_runs(redis_server, authority):
    with redis_server.client() as client:
        client.flushdb()
    secured, limits = security(authority, "broker"), {"max_runs": 4, "max_caller_share": 0.5}
    async with (
        serving(redis_server.url, security=secured, **limits) as (_, _, host),
        connect(host.address, security(authority, "alice"), service="broker") as to_alice,
        connect(host.address, security(authority, "bob"), service="broker") as to_bob,
    ):

        async def create(channel: grpc.aio.Channel, name: str) -> None:
            await World(broker_pb2_grpc.BrokerServiceStub(channel), None, name).create(members=())

        for name in ("b0", "b1"):
            await create(to_bob, name)
        said = await refused(create(to_bob, "b2"), EXHAUSTED)
        assert said.startswith("runs: the certificate 'bob' holds 2 and may hold")
        await create(to_bob, "b0")  # it stands
        await create(to_alice, "a0")
        assert await World(broker_pb2_grpc.BrokerServiceStub(to_bob), None, "b0").delete(force=True)
        await create(to_bob, "b2")
