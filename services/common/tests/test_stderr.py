"""What is on a service's standard error: its own lines as JSON, and what others write (gRPC, children) as it is."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from certificate_files import sign_again
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_client.authority import create_authority, export, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.ports import free_port

SERVICE = """
import os, subprocess, sys, warnings
from quartet_server.cli import service_main
from quartet.v1 import reward_pb2_grpc
from quartet_common.config import Section

class Sloppy(reward_pb2_grpc.RewardServiceServicer):
    async def ListVerifiers(self, request, context):
        print("from Python", file=sys.stderr)
        os.write(2, b"from a library\\n\\xff\\n")
        subprocess.run(["sh", "-c", "echo from a child >&2"])
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
    issue(folder / "pki", "late", ["rollout"])
    sign_again(folder / "pki", "late", -9, -8)
    export(folder / "pki", "late", folder / "pki" / "keys" / "late")
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
        return [json.loads(line) for line in self.lines() if line.startswith("{")]

    def lines(self) -> list[str]:
        whole, _, _ = self.log.read_text(errors="replace").rpartition("\n")
        return whole.splitlines()

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


async def test_failed_handshakes_are_in_the_log_as_grpc_writes_them(keys, served):
    await served.until("serving at")
    held_by = {name: held(keys / place / "keys" / name) for place, name in (("foreign", "rollout"), ("pki", "late"))}
    held_by["rollout"] = held_by["rollout"].model_copy(update={"tls_ca": keys / "pki" / "keys" / "late" / "ca.crt"})
    for security, reason in (
        (None, "WRONG_VERSION_NUMBER"),
        (held_by["rollout"], "unable to get local issuer certificate"),
        (held_by["late"], "certificate has expired"),
    ):
        before = len(served.lines())
        await ask(served, security, fails=grpc.StatusCode.UNAVAILABLE)
        async with asyncio.timeout(20):
            while not any("Handshake failed" in line and reason in line for line in served.lines()[before:]):
                await asyncio.sleep(0.02)


async def test_what_others_write_is_in_the_log_as_it_is_to_the_last_words_of_a_crash(keys):
    served = Served(keys)
    await served.until("serving at")
    async with connect(served.address, held(keys / "pki" / "keys" / "rollout"), service="reward") as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=20)
    assert served.process.wait(20) == -signal.SIGABRT
    said = served.lines()
    for words in ("from Python", "from a library", "from a child", "terminate called"):
        assert said.count(words) == 1, said
    assert any("an old way" in line for line in said)
