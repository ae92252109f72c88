"""Prometheus metrics: made once by name, served over HTTP beside the gRPC port."""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram, start_http_server

# From a fast in-memory call to a long generation, in seconds.
LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def counter(name: str, description: str, labels: Sequence[str] = ()) -> Counter:
    """Return a new counter. Its name ends in `_total`."""
    return Counter(name, description, labels)


def gauge(name: str, description: str, labels: Sequence[str] = ()) -> Gauge:
    """Return a new gauge."""
    return Gauge(name, description, labels)


def histogram(
    name: str, description: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
) -> Histogram:
    """Return a new histogram; by default of seconds."""
    return Histogram(name, description, labels, buckets=tuple(buckets))


def serve_metrics(host: str, port: int) -> None:
    """Serve the metrics at http://host:port/metrics from a daemon thread. Raises OSError if the port is taken."""
    start_http_server(port, addr=host)
