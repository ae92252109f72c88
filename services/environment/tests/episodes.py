"""A running environment service, requests to it, and a stand-in for the rollout's endpoint."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from quartet.v1 import environment_pb2, environment_pb2_grpc, experience_pb2

from quartet_common.config import load_config
from quartet_common.durations import to_duration
from quartet_environment.app import assemble, close
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import Environment, load_environments
from quartet_server.host import ServiceHost

NEW = itertools.count()
TIMEOUT = 60.0


@dataclass
class Running:
    """A service under test, its parts, and a stub that speaks to it."""

    stub: environment_pb2_grpc.EnvironmentServiceStub
    host: ServiceHost
    environments: dict[str, Environment]

    async def play(self, name: str, timeout: float = TIMEOUT, **fields: Any) -> environment_pb2.RunEpisodeResponse:
        return await self.stub.RunEpisode(episode(name, **fields), timeout=timeout)


def settings(*overrides: str):
    given = ["addresses.environment=127.0.0.1:0", "server.drain_seconds=2", *overrides]
    return load_config("environment", EnvironmentServiceSection, overrides=given)


@asynccontextmanager
async def serving(*overrides: str) -> AsyncIterator[Running]:
    config = settings(*overrides)
    host = ServiceHost("environment", config.addresses.environment, config.security, config.server)
    environments = load_environments(config)
    assemble(config, host, environments)
    for one in environments.values():
        one.pool.start()
    await host.start()
    async with asyncio.timeout(TIMEOUT):
        for one in environments.values():
            await one.pool.ready.wait()
    async with grpc.aio.insecure_channel(host.address) as channel:
        try:
            yield Running(environment_pb2_grpc.EnvironmentServiceStub(channel), host, environments)
        finally:
            await host.drain()
            await close(environments)


def episode(
    name: str,
    task: dict[str, Any] | None = None,
    prompt: experience_pb2.Prompt | None = None,
    parameters: dict[str, Any] | None = None,
    url: str = "http://127.0.0.1:9/v1",
    deadline: float | None = None,
    **fields: Any,
) -> environment_pb2.RunEpisodeRequest:
    """An episode of one task."""
    fields.setdefault("episode_id", f"episode-{next(NEW)}")
    request = environment_pb2.RunEpisodeRequest(
        environment=experience_pb2.EnvironmentSpec(name=name, served=True),
        prompt=prompt or experience_pb2.Prompt(prompt_id="p", task=json.dumps(task or {})),
        endpoint=environment_pb2.Endpoint(base_url=url, api_key="episode-key", model="policy"),
        **fields,
    )
    request.environment.parameters.update(parameters or {})
    if deadline is not None:
        request.deadline.CopyFrom(to_duration(deadline))
    return request


async def until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@contextmanager
def endpoint(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The base URL of an OpenAI endpoint that repeats the last message, and the calls that it got."""
    calls: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append({"path": self.path, "body": body, "headers": dict(self.headers)})
            message = {"role": "assistant", "content": body["messages"][-1]["content"]}
            answer = {
                "id": "a",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            data = json.dumps(answer if status == 200 else {"error": {"message": "no"}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", calls
    finally:
        server.shutdown()
        server.server_close()
