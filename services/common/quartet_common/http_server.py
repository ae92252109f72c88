"""A small threaded HTTP server for pages and metrics, with a bounded number of connections and a check of Host."""

import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from urllib.parse import urlsplit

_MOST_CONNECTIONS = 16
CLIENT_SECONDS = 5.0
"""For a handler's `timeout`: the connection of a client that neither sends nor reads for so long is closed."""


class BoundedHTTPServer(ThreadingHTTPServer):
    """Serves at most 16 connections at a time, each in a thread. A new one beyond these closes the oldest.

    Args:
        host, port: where to listen; port 0: a free one.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False  # closing the server does not wait for clients to close their connections
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
                with suppress(OSError):  # the client has closed it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        """See `socketserver.BaseServer`."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Do nothing: a connection that ends, on either side, is no error."""


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Return whether a request's Host header names this server.

    By DNS rebinding a web page can point a name of its own at this server and read what it serves. Addresses, and names
    without a dot, such as localhost or a container's, cannot be used for that and are accepted.

    Args:
        host: the header's value; "" if the request has none, as no browser's.
        names: names with a dot that are accepted too.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with suppress(ValueError):
        return bool(ip_address(name))
    return "." not in name or name in {each.lower() for each in names}
