"""The [broker] section of the run file."""

from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, field_serializer, field_validator

from quartet_common.config import Section

_SCHEMES = ("redis://", "rediss://", "unix://")


class BrokerSection(Section):
    """[broker]: which Redis, and what it may hold for people and results."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis 6.2 or later: redis://, rediss:// (TLS) or unix://."
    )
    redis_timeout: float = Field(5.0, gt=0, description="Seconds to wait for an answer of Redis.")
    redis_connections: int = Field(64, ge=2, description="Most connections to Redis.")
    sweep_interval: float = Field(1.0, gt=0, le=60, description="Seconds between sweeps of expired leases and members.")
    sample_events_per_step: int = Field(2, ge=0, description="Groups per policy version shown as GroupSample events.")
    max_result_bytes: int = Field(
        256 << 20, ge=0, description="Most bytes of transcripts kept to be collected, per run and purpose."
    )
    remembered_instances: int = Field(
        1_000_000, ge=1, description="Settled instances a run remembers, to refuse them when they are submitted again."
    )

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(_SCHEMES):
            raise ValueError(f"must begin with one of {', '.join(_SCHEMES)}")
        return value

    @field_serializer("redis_url", when_used="json")
    def _hide_password(self, value: str) -> str:
        return without_password(value)


def without_password(url: str) -> str:
    """Return a Redis URL fit for logs and messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))
