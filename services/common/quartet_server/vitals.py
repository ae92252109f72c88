"""Metrics that every service has: what it is, when its certificate expires, how full its disks are.

The time of its start is prometheus_client's own `process_start_time_seconds`.
"""

import math
import ssl
from collections.abc import Callable
from pathlib import Path

from quartet_common.build import read_build
from quartet_common.certificates import Watch, handshake_with_itself
from quartet_common.config import SecuritySection
from quartet_common.disk import free_bytes, size_bytes
from quartet_server import metrics

_BUILD = metrics.gauge("quartet_build_info", "1, for the version of the service.", ["service", "version"])
_CERTIFICATE_EXPIRY = metrics.gauge(
    "quartet_certificate_expiry_timestamp_seconds",
    "When the service's certificate expires, in seconds since the epoch; 0: its CA refuses it, as it does one that has "
    "expired.",
    ["certificate"],
)
_DISK_FREE = metrics.gauge(
    "quartet_disk_free_bytes", "Free bytes on the disk of a folder that the service writes.", ["folder"]
)
_DISK_SIZE = metrics.gauge("quartet_disk_size_bytes", "Bytes of that disk.", ["folder"])


def report_build(service: str) -> None:
    """Export the version of this service."""
    _BUILD.labels(service, read_build()).set(1)


def report_certificate(security: SecuritySection) -> None:
    """Export when the certificate on disk expires. It is read again when it has changed."""
    watch, end = Watch(security), _expiry(security)

    def current() -> float:
        nonlocal end
        if watch.changed():
            end = _expiry(security)
        return end

    _CERTIFICATE_EXPIRY.labels(security.tls_certificate).set_function(current)


def _expiry(security: SecuritySection) -> float:
    try:
        return ssl.cert_time_to_seconds(handshake_with_itself(security)["notAfter"])
    except (ssl.SSLError, OSError):
        return 0.0


def report_disk(folder: Path) -> None:
    """Export the size of the disk of a folder, which need not exist yet, and what is free on it."""
    _DISK_FREE.labels(folder).set_function(lambda: _read(free_bytes, folder))
    _DISK_SIZE.labels(folder).set_function(lambda: _read(size_bytes, folder))


def _read(measure: Callable[[Path], int], folder: Path) -> float:
    try:
        return measure(folder)
    except OSError:  # a network disk that is away must not take the other metrics with it
        return math.nan
