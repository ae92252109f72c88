"""Seconds, as floats, to and from the contract's well-known types."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def to_duration(seconds: float) -> Duration:
    """Return `seconds` as a Duration, to the nanosecond."""
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def to_seconds(duration: Duration) -> float:
    """Return a Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def now_timestamp() -> Timestamp:
    """Return the time of this host's clock."""
    timestamp = Timestamp()
    timestamp.GetCurrentTime()
    return timestamp
