"""The HTTP server of the endpoint before any application."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from test_identities import pki, security

from quartet_common.config import SecuritySection
from quartet_common.errors import ContractError, resource_exhausted, unavailable
from quartet_rollout.agents.episodes import Episodes
from quartet_rollout.endpoint.gate import Gate
from quartet_rollout.endpoint.server import EndpointServer, listen

__all__ = ["pki"]


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


async def test_a_caller_without_a_certificate_is_served_and_the_server_is_checked(pki: Path) -> None:
    listening = listen("127.0.0.1", 0)
    server = EndpointServer(listening, security(pki, "rollout"), drain_seconds=1.0)
    task = asyncio.create_task(server.run(application))
    url = f"https://127.0.0.1:{listening.getsockname()[1]}/"
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=pki / "ca.pem")) as client:
        assert (await client.get(url)).text == "served"
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    await server.stop()
    await task


async def test_a_websocket_is_served_as_the_request_that_it_began_as() -> None:
    listening = listen("127.0.0.1", 0)
    server = EndpointServer(listening, SecuritySection(), drain_seconds=1.0)
    task = asyncio.create_task(server.run(application))
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{listening.getsockname()[1]}/", headers=upgrade)
    assert answer.text == "served"
    await server.stop()
    await task


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (unavailable("rollout", "it is stopping"), 503, True),
        (resource_exhausted("max_direct_queued", "too many wait", retry_after_seconds=1), 429, True),
        (resource_exhausted("max_direct_completions", "too many"), 400, False),
    ],
)
async def test_what_is_not_admitted_is_to_be_retried_if_that_can_help(
    error: ContractError, status: int, retry: bool
) -> None:
    class Full:
        @asynccontextmanager
        async def entered(self, completions: int) -> AsyncIterator[None]:
            raise error
            yield

    state = SimpleNamespace(draining=False, sleep_level=0, policy_version=3)
    gate = Gate(application, state, Full(), Episodes(), ["key"])  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://gate") as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/completions", headers={"x-api-key": "key"}, json={"prompt": "a"})
    assert answer.status_code == status and ("retry-after" in answer.headers) is retry
    assert error.message in answer.json()["error"]["message"]


async def test_a_stopped_server_takes_no_further_connection() -> None:
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = EndpointServer(listening, SecuritySection(), drain_seconds=1.0)
    task = asyncio.create_task(server.run(application))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "served"
        await server.stop()
        await task
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/")


def test_an_address_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError):
        listen("127.0.0.1", taken.getsockname()[1])
