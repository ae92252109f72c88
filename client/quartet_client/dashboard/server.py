"""The page and its JSON over HTTP, for a browser on this machine.

The standard library's server in a thread: the page is a few static files and two documents that are made already, asked
for once a second by a person or two. aiohttp or uvicorn would bring ten packages for that. The page polls; a stream of
server-sent events would save a few bytes and cost a held thread for each open page, and a laptop that slept would have
to notice that its stream died.
"""

import mimetypes
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources

from quartet_client.errors import InputError
from quartet_common.config import is_loopback
from quartet_common.http_server import CLIENT_SECONDS, BoundedHTTPServer

_FILES = ("index.html", "style.css", "app.js", "charts.js", "parts.js", "samples.js", "icon.svg")
_HEADERS = {
    # Models write what they like. Nothing of it can become code: only the page's own files run, no markup is ever made
    # from a string, and nothing is sent anywhere.
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
        InputError: host is not a loopback address and `allow_remote` is not set, or the port is taken.
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
        except OSError as error:
            raise InputError(f"--port: {host}:{port} cannot be listened on: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
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
            # A page elsewhere could have its own name point here (DNS rebinding) and read the run.
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this page is asked for by the name localhost only")
            return
        path = self.path.partition("?")[0]
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name.startswith("api/"):
            body, kind = self.documents().get(name.removeprefix("api/")), "application/json"
        else:
            body = _FILES_READ.get(name)
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
        """Say nothing: a line each second is no news."""


def _read_files() -> dict[str, bytes]:
    folder = resources.files(__package__) / "page"
    return {name: (folder / name).read_bytes() for name in _FILES}


_FILES_READ = _read_files()
