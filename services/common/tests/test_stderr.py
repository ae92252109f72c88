"""What a service's log is made of: JSON lines alone, whoever writes them, with the calls and handshakes it refused."""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_client.authority import create_authority, export, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.ports import free_port

SERVICE = """
import os, subprocess, sys, warnings
from quartet_common.cli import service_main
from quartet.v1 import reward_pb2_grpc
from quartet_common.config import Section

class Sloppy(reward_pb2_grpc.RewardServiceServicer):
    async def ListVerifiers(self, request, context):
        print("from Python", file=sys.stderr)
        os.write(2, b"from a library\\n\\xff\\n")
        subprocess.run(["sh", "-c", "echo from a child >&2"])
        subprocess.run(["sh", "-c", "echo '{\\"message\\": \\"a record of a child\\", \\"of\\": \\"\u009b1A\\"}' >&2"])
        os.write(2, b"{" + b"[" * 100_000 + b"\\n")
        warnings.warn("an old way", stacklevel=1)
        os.write(2, b"terminate called\\n"), os.abort()

async def serve(config, host):
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Sloppy(), host.server)
    await host.run()

class Any(Section, extra="allow"):
    pass

sys.exit(service_main("reward", Any, lambda config: {}, serve))
"""


def held(folder: Path) -> SecuritySection:
    return SecuritySection(tls_ca=folder / "ca.crt", tls_certificate=folder / "tls.crt", tls_key=folder / "tls.key")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for authority, names in (("pki", ("reward", "rollout", "trainer")), ("foreign", ("rollout",))):
        create_authority(folder / authority)
        for name in names:
            issue(folder / authority, name, [name])
            export(folder / authority, name, folder / authority / "keys" / name)
    return folder


class Served:
    """The service above as a process of its own; its log."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / f"{self.port}.log"
        own = held(folder / "pki" / "keys" / "reward").model_dump(include={"tls_ca", "tls_certificate", "tls_key"})
        words = [f"addresses.reward={self.address}", *(f"security.{key}={path}" for key, path in own.items())]
        self.command = [sys.executable, "-c", SERVICE, "--log-format", "json"]
        for word in words:
            self.command += ["--set", word]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stderr=log)

    def records(self) -> list[dict]:
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    async def until(self, message: str, count: int = 1) -> list[dict]:
        async with asyncio.timeout(30):
            while True:
                assert self.process.poll() is None or message in self.log.read_text(), self.log.read_text()
                found = [each for each in self.records() if message in each["message"]]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.02)

    def metric(self, series: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 100}/metrics", timeout=10) as page:
            values = [line.split()[-1] for line in page.read().decode().splitlines() if line.startswith(series)]
        return sum(map(float, values))


@pytest.fixture(scope="module")
def served(keys) -> Iterator[Served]:
    served = Served(keys)
    yield served
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert served.records()[-1]["message"] == "stopped"


async def ask(served: Served, security: SecuritySection | None, *, fails: grpc.StatusCode) -> None:
    async with connect(served.address, security, service="reward") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_pb2_grpc.RewardServiceStub(channel).Execute(reward_pb2.ExecuteRequest(), timeout=2)
        assert caught.value.code() is fails


async def test_calls_without_the_right_to_make_them_are_in_the_log_once(keys, served):
    await served.until("serving at")
    for _ in range(3):
        await ask(served, held(keys / "pki" / "keys" / "trainer"), fails=grpc.StatusCode.PERMISSION_DENIED)
    (line,) = await served.until("call refused")
    about = {"method": "/quartet.v1.RewardService/Execute", "code": "PERMISSION_DENIED", "repeated": 0}
    about |= {"caller": "certificate trainer", "roles": "trainer", "level": "WARNING", "service": "reward"}
    assert line.items() >= about.items()
    assert line["peer"].startswith("ipv4:127.0.0.1:") and "allowed: client, operator, rollout" in line["reason"]
    assert len([each for each in served.records() if each["message"] == "call refused"]) == 1
    assert served.metric('quartet_grpc_calls_total{code="PERMISSION_DENIED"') == 3


async def test_an_address_in_use_is_a_failure_of_a_start_and_a_mistake_of_a_dry_run(served):
    await served.until("serving at")
    for arguments, status in (([], 1), (["--dry-run", "--check-port"], 2)):
        done = subprocess.run([*served.command, *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == status and f"cannot listen on {served.address}" in done.stderr, done


async def test_failed_handshakes_are_in_the_log_with_their_peer_and_are_counted(keys, served):
    await served.until("serving at")
    await ask(served, None, fails=grpc.StatusCode.UNAVAILABLE)
    foreign = held(keys / "foreign" / "keys" / "rollout").model_copy(
        update={"tls_ca": keys / "pki" / "keys" / "rollout" / "ca.crt"}
    )
    await ask(served, foreign, fails=grpc.StatusCode.UNAVAILABLE)
    context = ssl.create_default_context(cafile=str(keys / "pki" / "ca.pem"))
    with pytest.raises((ssl.SSLError, ConnectionError)):  # TLS 1.3: the server's no comes with the first read
        reader, _ = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        assert not await reader.read(1)
        raise ConnectionError
    _, probe = await asyncio.open_connection("127.0.0.1", served.port)
    probe.close()  # a TCP probe is no failure
    lines = await served.until("TLS handshake failed", 3)
    assert {line["cause"] for line in lines} == {"not_tls", "certificate", "no_certificate"}
    for line in lines:
        assert line["peer"].startswith("ipv4:127.0.0.1:") and line["side"] == "server" and line["level"] == "WARNING"
        assert served.metric(f'quartet_tls_handshakes_failed_total{{reason="{line["cause"]}",side="server"') >= 1


def test_the_command_line_is_read_before_grpc_which_reads_what_to_trace_when_it_is_imported():
    code = "import sys, quartet_common.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


async def test_each_line_is_a_record_to_the_last_words_of_a_crash(keys):
    served = Served(keys)
    await served.until("serving at")
    async with connect(served.address, held(keys / "pki" / "keys" / "rollout"), service="reward") as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=20)
    assert served.process.wait(20) == -signal.SIGABRT
    await served.until("terminate called")
    said = [each["message"] for each in served.records()]
    for words in ("from Python", "from a library", "from a child", "a record of a child", "terminate called"):
        assert said.count(words) == 1, said
    assert served.log.read_text().isascii() and max(map(len, said)) > 100_000
    assert any("an old way" in each for each in said)
