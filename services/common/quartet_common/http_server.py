"""A small HTTP server in threads, for pages and metrics beside gRPC: bounded, and for callers who use its own name."""

import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from urllib.parse import urlsplit

_MOST_CONNECTIONS = 16
CLIENT_SECONDS = 5.0
"""For a handler's `timeout`: a client that neither says nor reads anything for so long is hung up on."""


class BoundedHTTPServer(ThreadingHTTPServer):
    """Serves a few connections at a time, each in a thread. To a new one beyond those the oldest gives way.

    Args:
        host, port: where to listen; port 0: a free one.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False  # a client may keep its connection for a while; the end does not wait for it
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]):
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._changing = threading.Lock()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)

    def process_request(self, request, client_address) -> None:
        """See `socketserver.BaseServer`."""
        with self._changing:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has ended itself
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        """See `socketserver.BaseServer`."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Say nothing: a client that hangs up, or is hung up on, is no error."""


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Return whether a request's Host header names this server.

    A page elsewhere can have a name of its own point here (DNS rebinding) and read what is served. It cannot have an
    address as its name, nor one without a dot, such as localhost or a container's.

    Args:
        host: the header's value, "" without one: then it is no browser.
        names: with a dot, by which this server is called, too.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with suppress(ValueError):
        return bool(ip_address(name))
    return "." not in name or name in {each.lower() for each in names}
