"""The HTTP server of the model endpoint."""

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from quartet_common.config import SecuritySection
from quartet_common.log import get_logger
from quartet_rollout.endpoint.gate import App

log = get_logger(__name__)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the service's host has its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class EndpointServer:
    """Serves an ASGI application on a socket that listens already, with the certificates of [security]."""

    def __init__(self, listening: socket.socket, security: SecuritySection, drain_seconds: float):
        self._socket, self._security, self._drain_seconds = listening, security, drain_seconds
        self._server: uvicorn.Server | None = None
        self._ended = asyncio.Event()

    async def run(self, app: App) -> None:
        """Serve until `stop`."""
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=max(1, int(self._drain_seconds)),
            # httpx, and so the OpenAI client, keeps an idle connection for 5 s, as uvicorn does by default: a request
            # on a connection that is just being closed fails.
            timeout_keep_alive=60,
        )
        config.load()
        if self._security.tls:
            # Callers are known by their keys: an OpenAI client has no certificate of its own.
            config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            config.ssl.load_cert_chain(str(self._security.tls_certificate), self._security.tls_key)
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Take no further connection, and give requests under way `drain_seconds` to end."""
        if self._server is not None:
            self._server.should_exit = True
            await self._ended.wait()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)  # connections wait for the server
    except OSError:
        bound.close()
        raise
    return bound
