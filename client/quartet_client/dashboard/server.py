"""Collects a run from the broker, the services and metrics.jsonl, and serves its page to browsers on this machine.

The standard library's HTTP server is enough for static files and two prepared JSON documents, polled once a second by a
few people; aiohttp or uvicorn would add ten packages.
"""

import asyncio
import errno
import json
import logging
import mimetypes
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path

import grpc

from quartet_client.async_client import AsyncClient
from quartet_client.connection import KINDS, repeatedly, until_first
from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.snapshot import samples, snapshot
from quartet_client.errors import InputError, QuartetError
from quartet_client.progress import MetricsFile
from quartet_common.config import is_loopback
from quartet_common.http_server import CLIENT_SECONDS, BoundedHTTPServer

_logger = logging.getLogger(__name__)

_ASK_SECONDS = 2.0
_DRAW_SECONDS = 0.5  # the page asks every second
_DEAD_SHOWN = 20


class Collector:
    """Keeps a Picture current, and the documents that the page polls.

    Args:
        client: of the services.
        run_id: the run; None: the newest active one, or else the newest.
        folder: of the run's records; None: runs/<id> in the working folder.

    Attributes:
        documents: "state" and "samples" as encoded JSON; replaced, never changed, so that any thread may read it.
    """

    def __init__(self, client: AsyncClient, run_id: str | None = None, folder: Path | None = None):
        self._client = client
        self._folder = folder
        self._found = asyncio.Event()
        self.picture = Picture()
        self._samples_drawn = -1
        self.documents: dict[str, bytes] = {}
        if run_id:
            self._begin(run_id)
        self._draw()

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. A service that is away, or a run that does not exist, raises nothing."""
        # One task per service: one that does not answer delays none of the others.
        asking = [repeatedly(_ASK_SECONDS, work) for work in (self._ask_run, self._follow, self._read_file)]
        asking += [repeatedly(_ASK_SECONDS, partial(self._ask_service, kind)) for kind in KINDS]
        await until_first(stop.wait(), repeatedly(_DRAW_SECONDS, self._keep_drawn), *asking)

    def _begin(self, run_id: str) -> None:
        folder = self._folder or Path("runs") / run_id
        self.picture.run_id, self.picture.folder = run_id, str(folder)
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._found.set()

    async def _ask_run(self) -> None:
        try:
            await self._ask_run_once()
            self.picture.broker_answered()
        except QuartetError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                self.picture.broker_answered()  # that the run does not exist
            else:
                self.picture.broker_failed(str(error).rstrip("."))

    async def _ask_run_once(self) -> None:
        if not self._found.is_set():
            runs = await self._client.list_runs()
            chosen = next((run for run in runs if run.active), runs[0] if runs else None)
            if chosen is None:
                return
            self._begin(chosen.run_id)
        run = await self._client.get_run(self.picture.run_id)
        self.picture.fold_run(run)
        if run.stats.dead != self.picture.dead_total or (run.stats.dead and not self.picture.dead):
            self.picture.dead, self.picture.dead_total = await self._client.list_dead(run.run_id, _DEAD_SHOWN)

    async def _follow(self) -> None:
        """Fold the run's events. `watch` retries in short outages; after a long one this is called again."""
        await self._found.wait()
        picture = self.picture
        try:
            async for event in self._client.watch(picture.run_id, picture.last_event_id):
                picture.fold(event)
                picture.broker_answered()
        except QuartetError as error:
            # `_ask_run` reports a run that does not exist.
            if error.code not in (None, grpc.StatusCode.NOT_FOUND):
                picture.broker_failed(str(error).rstrip("."))

    async def _ask_service(self, kind: str) -> None:
        self.picture.fold_service(await self._client.get_service(kind))

    async def _read_file(self) -> None:
        await self._found.wait()
        rewritten, rows = await asyncio.to_thread(self._file.read)
        self.picture.fold_rows(rewritten, rows)
        self.picture.file_problem = self._file.problem

    async def _keep_drawn(self) -> None:
        self._draw()

    def _draw(self) -> None:
        drawn = {**self.documents, "state": _encoded(snapshot(self.picture, time.time()))}
        if self._samples_drawn != self.picture.samples_seen:
            drawn["samples"] = _encoded(samples(self.picture))
            self._samples_drawn = self.picture.samples_seen
        self.documents = drawn


def _encoded(document: dict) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


_PAGE = resources.files(__package__) / "page"
_FILES = ("index.html", "style.css", "app.js", "charts.js", "parts.js", "samples.js", "icon.svg")
_CONTENTS = {name: (_PAGE / name).read_bytes() for name in _FILES}
_HEADERS = {
    # Completions are untrusted: only the page's own scripts run, no string becomes markup, and the page connects to
    # this server alone.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer:
    """Serves the page in threads of its own. Use it as a context manager.

    Args:
        documents: returns the JSON documents by name; called from the server's threads.
        host, port: where to listen; port 0: a free one.
        allow_remote: listen where other machines can reach it. There is no login and no TLS: whoever reaches the port
            reads the run, its prompts and completions. By default other addresses than loopback are refused.

    Raises:
        InputError: host is not a loopback address and `allow_remote` is not set, or not this machine's, or the port is
            taken.
    """

    def __init__(
        self,
        documents: Callable[[], dict[str, bytes]],
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
    ):
        if not (allow_remote or is_loopback(host)):
            raise InputError(
                f"--host: got {host}, which other machines can reach; the page has no login. Allowed: a loopback "
                f"address (use an SSH tunnel: ssh -L {port}:127.0.0.1:{port} HOST), or any with --allow-remote"
            )
        handler = type("_Handler", (_PageHandler,), {"documents": staticmethod(documents), "any_host": allow_remote})
        try:
            self._server = BoundedHTTPServer(host, port, handler)
        except (OSError, UnicodeError) as error:
            of_host = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
            reason = getattr(error, "strerror", None) or error
            option = "--host" if of_host else "--port"
            raise InputError(f"{option}: {host}:{port} cannot be listened on: {reason}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def address(self) -> str:
        """The page's address for a browser."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


class _PageHandler(BaseHTTPRequestHandler):
    documents: Callable[[], dict[str, bytes]]
    any_host: bool
    protocol_version = "HTTP/1.1"
    server_version = "quartet-dashboard"
    sys_version = ""
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:  # noqa: N802
        self._answer(body_too=True)

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer(body_too=False)

    def _answer(self, body_too: bool) -> None:
        if not self._host_is_ours():
            # Else another site could point its own name here (DNS rebinding) and read the run.
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this page is asked for by the name localhost only")
            return
        path = self.path.partition("?")[0]
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name.startswith("api/"):
            body, kind = self.documents().get(name.removeprefix("api/")), "application/json"
        else:
            body = _CONTENTS.get(name)
            kind = mimetypes.guess_type(name)[0] or "text/plain"
        if body is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body_too:
            self.wfile.write(body)

    def _host_is_ours(self) -> bool:
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return self.any_host or is_loopback(name.strip("[]").lower())

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: the page is polled once a second."""
