"""The HTTP server of the endpoint before any application."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_identities import pki, security

from quartet_common.config import SecuritySection
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
