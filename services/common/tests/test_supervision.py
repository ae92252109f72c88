"""sd_notify over a real datagram socket, as systemd would listen."""

import asyncio
import socket

import pytest

from quartet_common.config import SecuritySection, ServerSection
from quartet_common.host import ServiceHost


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        yield listener


async def heard(listener: socket.socket) -> dict[str, str]:
    message = await asyncio.to_thread(listener.recv, 4096)
    return dict(line.split("=", 1) for line in message.decode().splitlines())


async def test_a_service_says_when_it_is_ready_that_it_lives_and_when_it_stops(listener, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    host = ServiceHost("reward", "127.0.0.1:0", SecuritySection(), ServerSection(metrics=False))
    await host.start()
    assert await heard(listener) == {"READY": "1", "STATUS": f"serving at {host.address}"}
    for _ in range(3):
        assert await heard(listener) == {"WATCHDOG": "1"}
    await host.drain()
    last = await heard(listener)
    while last == {"WATCHDOG": "1"}:
        last = await heard(listener)
    assert last["STOPPING"] == "1"
