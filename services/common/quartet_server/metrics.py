"""Prometheus metrics, served over HTTP beside the gRPC port."""

import threading
from collections.abc import Collection, Sequence
from http import HTTPStatus

from prometheus_client import Counter, Gauge, Histogram, MetricsHandler

from quartet_common.http_server import CLIENT_SECONDS, BoundedHTTPServer, is_own_name

# From a fast in-memory call to a long generation, in seconds.
LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


counter, gauge = Counter, Gauge


def histogram(
    name: str, description: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
) -> Histogram:
    """Return a new histogram; by default of seconds."""
    return Histogram(name, description, labels, buckets=tuple(buckets))


class _Handler(MetricsHandler):
    server: BoundedHTTPServer
    timeout = CLIENT_SECONDS
    names: Collection[str]

    def do_GET(self) -> None:  # noqa: N802
        if is_own_name(self.headers.get("Host", ""), {self.server.server_name, *self.names}):
            super().do_GET()
        else:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "the Host is none of this service: server.metrics_hosts")


def serve_metrics(host: str, port: int, names: Collection[str] = ()) -> None:
    """Serve the metrics at http://host:port/metrics from a daemon thread. Raises OSError if the port is taken.

    Args:
        names: further host names that are accepted in requests, see `is_own_name`.
    """
    server = BoundedHTTPServer(host, port, type("_NamedHandler", (_Handler,), {"names": names}))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
