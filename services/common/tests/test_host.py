"""The server bootstrap, over real sockets: errors, refusals, the token, probes, drain.

Certificates are tests/contract/test_security.py's and test_server_roles.py's; health and reflection test_servers.py's.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from quartet.v1 import common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common import ports
from quartet_common.channel import connect
from quartet_common.config import ConfigError, SecuritySection, ServerSection
from quartet_common.errors import describe, invalid_argument, resource_exhausted, retry_delay
from quartet_common.handshake import handshake
from quartet_server import probe
from quartet_server.host import ServiceHost


class Fussy(reward_pb2_grpc.RewardServiceServicer):
    """Answers by what the first item is called."""

    async def Score(self, request, context):  # noqa: N802
        name = request.items[0].item_id
        if name == "bad":
            raise invalid_argument("items[0].item_id", came="'bad'", allowed="anything good")
        if name == "full":
            raise resource_exhausted("queue", "1024 items wait", retry_after_seconds=0.25)
        if name == "bug":
            raise ZeroDivisionError
        return reward_pb2.ScoreResponse()

    async def ScoreStream(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            if request.item.item_id == "bad":
                raise invalid_argument("item.item_id", came="'bad'", allowed="anything good")
            yield reward_pb2.ScoreStreamResponse()


Serve = Callable[..., Awaitable[ServiceHost]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts hosts, which are drained when the test has ended, however it ends: an open server keeps its process."""
    hosts: list[ServiceHost] = []

    async def start(security: SecuritySection | None = None, **settings) -> ServiceHost:
        server = ServerSection(metrics=False, **settings)
        hosts.append(ServiceHost("reward", "127.0.0.1:0", security or SecuritySection(), server))
        reward_pb2_grpc.add_RewardServiceServicer_to_server(Fussy(), hosts[-1].server)
        await hosts[-1].start()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.drain()


def item(name: str) -> reward_pb2.ScoreRequest:
    return reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(item_id=name)])


def fields_of(error: grpc.RpcError) -> list[str]:
    """The fields that a refusal blames."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    return [violation.field for violation in detail.field_violations]


async def test_errors_carry_details_and_become_one_sentence(serve):
    host = await serve()
    async with connect(host.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(item("bad"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert describe(caught.value) == "items[0].item_id: got 'bad'; allowed: anything good"
        assert fields_of(caught.value) == ["items[0].item_id"]

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(item("full"), timeout=5)
        assert retry_delay(caught.value) == 0.25

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(item("bug"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INTERNAL and "ZeroDivision" not in describe(caught.value)

        async def items():
            yield reward_pb2.ScoreStreamRequest(item=reward_pb2.ScoreItem(item_id="good"))
            yield reward_pb2.ScoreStreamRequest(item=reward_pb2.ScoreItem(item_id="bad"))

        answers = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ScoreStream(items(), timeout=5):
                answers += 1
        assert answers == 1 and caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_metrics_port_beyond_the_last_port_is_one_sentence():
    port = next(port for port in range(65_535, 65_000, -1) if ports._is_free("127.0.0.1", port))
    host = ServiceHost("reward", f"127.0.0.1:{port}", SecuritySection(), ServerSection(metrics_port_offset=1000))
    with pytest.raises(ConfigError, match=rf"server.metrics_port_offset: {port + 1000} is no port"):
        await host.start()


async def test_a_request_above_its_methods_limit_is_refused_unparsed(serve):
    host = await serve()
    host.limit_requests({"/quartet.v1.RewardService/Score": 100})
    async with connect(host.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        allowed = item("x" * 90)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/quartet.v1.RewardService/Score")(b"\xff" * 101, timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert describe(caught.value) == "request: got 101 bytes; allowed: at most 100 bytes"
        assert fields_of(caught.value) == [""], "no field of the request is called 'request'"
        assert len(allowed.SerializeToString()) <= 100 and await stub.Score(allowed, timeout=5)


async def test_a_token_is_asked_of_every_call_but_probes(serve, tmp_path, capsys):
    (tmp_path / "token").write_text("s3cret\n")
    security = SecuritySection(token_file=tmp_path / "token")
    host = await serve(security)
    async with connect(host.address) as stranger, connect(host.address, security) as friend:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await handshake(stranger, common_pb2.SERVICE_KIND_CLIENT)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await handshake(friend, common_pb2.SERVICE_KIND_CLIENT)).instance_id == host.instance_id
        stream = reward_pb2_grpc.RewardServiceStub(friend).ScoreStream(iter(()), timeout=5)
        assert [answer async for answer in stream] == []

    async def probed(*arguments: str) -> int:
        return await asyncio.to_thread(probe.main, ["reward", *arguments])

    file = tmp_path / "run.toml"
    file.write_text(f'[addresses]\nreward = "{host.address}"\n[reward]\nof_its_own = 1\n')
    assert await probed(str(file)) == 0
    await host.set_serving(False)
    assert await probed(str(file)) == 1 and await probed(str(file), "--live") == 0
    port = host.address.rpartition(":")[2]
    assert await probed(f"--set=addresses.reward=gpu7.example:{port}", "--set=server.bind_host=0.0.0.0") == 1
    assert capsys.readouterr().out == "SERVING\n" + "NOT_SERVING\n" * 3


async def test_a_process_that_accepts_connections_and_answers_nothing_is_not_live():
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel accepts for a stopped process too
        port = stopped.getsockname()[1]
        arguments = ["reward", f"--set=addresses.reward=127.0.0.1:{port}", "--live", "--timeout=0.5"]
        assert await asyncio.to_thread(probe.main, arguments) == 3


async def test_a_service_that_loads_answers_and_is_ready_only_when_it_says_so(serve, monkeypatch):
    told: list[dict[str, object]] = []
    monkeypatch.setattr("quartet_server.process.SystemdNotifier.notify", lambda self, **facts: told.append(facts))
    host = ServiceHost("reward", "127.0.0.1:0", SecuritySection(), ServerSection(metrics=False))
    host.loading = "model"
    await host.start()
    arguments = ["reward", f"--set=addresses.reward={host.address}"]
    assert await asyncio.to_thread(probe.main, arguments) == 1
    assert len(told) == 1 and str(told[0]["STATUS"]).startswith("loading") and "READY" not in told[0]
    assert await asyncio.to_thread(probe.main, [*arguments, "--live"]) == 0
    await host.set_ready()
    assert await asyncio.to_thread(probe.main, arguments) == 0 and told[-1]["READY"] == 1
    await host.drain()


async def test_systemd_hears_when_it_is_ready_that_it_lives_and_when_it_stops(serve, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", "60000")

        async def heard() -> dict[str, str]:
            message = await asyncio.to_thread(listener.recv, 4096)
            return dict(line.split("=", 1) for line in message.decode().splitlines())

        host = await serve()
        assert await heard() == {"READY": "1", "STATUS": f"serving at {host.address}"}
        for _ in range(3):
            assert await heard() == {"WATCHDOG": "1"}
        await host.drain()
        while (last := await heard()) == {"WATCHDOG": "1"}:
            pass
        assert last["STOPPING"] == "1"


async def test_a_proxy_of_the_environment_is_not_asked_for_this_host(serve, monkeypatch):
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    host = await serve()
    async with connect(host.address) as channel:
        assert (await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=5)).service


async def test_plaintext_is_refused_off_loopback():
    with pytest.raises(ConfigError, match="0.0.0.0 is not loopback"):
        ServiceHost("reward", "127.0.0.1:0", SecuritySection(), ServerSection(bind_host="0.0.0.0"))
    ServiceHost("reward", "127.0.0.1:0", SecuritySection(insecure=True), ServerSection(bind_host="0.0.0.0"))


async def test_drains_run_in_order_and_within_their_time_and_one_that_fails_skips_none(serve):
    host = await serve(drain_seconds=0.3)
    seen = []

    async def first():
        seen.append("first")
        raise RuntimeError("boom")

    async def hangs():
        seen.append("hangs")
        await asyncio.Event().wait()

    host.on_drain(first)
    host.on_drain(hangs)
    host.spawn(asyncio.Event().wait(), "forever")
    async with asyncio.timeout(5):
        await host.drain()
    assert seen == ["first", "hangs"] and host.exit_code == 1


async def test_a_background_task_that_fails_stops_the_service(serve):
    host = await serve()

    async def fails():
        raise RuntimeError("boom")

    host.spawn(fails(), "loop")
    await asyncio.wait_for(host.stopping.wait(), 5)
    assert host.exit_code == 1


DEAF = """
import asyncio, contextlib, sys
from quartet_server import cli
from quartet_common.config import Section

class Any(Section, extra="allow"):
    pass

async def deaf():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

async def serve(config, host):
    host.task = asyncio.create_task(deaf())
    asyncio.get_running_loop().call_soon(host.stop, "the test ends")
    await host.run()

cli._END_SECONDS = 1.0
sys.exit(cli.service_main("reward", Any, lambda config: {}, serve, ["--set", "addresses.reward=127.0.0.1:0"]))
"""


def test_a_service_ends_although_a_task_ignores_its_cancellation():
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "_cancel_all_tasks" in done.stderr, done.stderr
