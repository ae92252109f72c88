"""The [broker] section of the run file, and the forms of its `redis_url`.

redis://[user:password@]host[:port][/db]          one server (rediss:// with TLS, unix:///path by socket)
redis+sentinel://host[:port],…/service[/db]       the master that Sentinels name
redis+cluster://host[:port],…                     the nodes of a Cluster; one that answers is enough
"""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_serializer, field_validator
from redis.asyncio.connection import parse_url

from quartet_common.sections import Section

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
_PORTS = {"cluster": 6379, "sentinel": 26379}
_OF_SENTINEL = "sentinel_"

Address = tuple[str, int]
"""Host and port of a server."""


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL.

    Attributes:
        form: "single", "sentinel" or "cluster".
        addresses: Sentinels, or the first known nodes of a Cluster; empty for a single server.
        service: the master's name at the Sentinels.
        options: arguments of a connection to a server that has data; its address too if it is a single one.
        sentinel_options: arguments of a connection to a Sentinel.
    """

    form: str
    addresses: tuple[Address, ...]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse(url: str) -> RedisUrl:
    """Parse a URL. Raises ValueError; its message contains no password."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"must begin with one of {', '.join(SCHEMES)}")
    scheme, _, rest = url.partition("://")
    protocol, _, form = scheme.partition("+")
    rest, _, query = rest.partition("?")
    if "@" in query or "@" in rest.partition("/")[2]:
        raise ValueError("in user, password and options write '/' as %2F, '?' as %3F, '@' as %40")
    netloc, _, path = rest.partition("/")
    credentials, _, hosts = netloc.rpartition("@")
    if not form:
        if "," in hosts:
            raise ValueError(f"{scheme}:// names one server; for several use redis+sentinel:// or redis+cluster://")
        return RedisUrl("single", (), "", _options(url), {})
    addresses = tuple(_address(item, _PORTS[form]) for item in hosts.split(","))
    service, _, db = path.partition("/") if form == "sentinel" else ("", "", path)
    if form == "sentinel" and not service:
        raise ValueError("name the master after the Sentinels' addresses: redis+sentinel://host:port,…/SERVICE")
    if form == "cluster" and db not in ("", "0"):
        raise ValueError(f"a Redis Cluster has no database but 0: take '/{db}' away")
    entries = [entry for entry in query.split("&") if entry]
    own = "&".join(entry for entry in entries if not entry.startswith(_OF_SENTINEL))
    theirs = "&".join(entry.removeprefix(_OF_SENTINEL) for entry in entries if entry.startswith(_OF_SENTINEL))
    tls = "&".join(entry for entry in entries if entry.startswith("ssl_"))
    user = f"{credentials}@" if credentials else ""
    options = _options(f"{protocol}://{user}host/{db}?{own}")
    sentinel_options = _options(f"{protocol}://host/?{'&'.join(filter(None, (tls, theirs)))}")
    for found in (options, sentinel_options):
        del found["host"]
    return RedisUrl(form, addresses, service, options, sentinel_options)


def _options(url: str) -> dict[str, Any]:
    try:
        return dict(parse_url(url))
    except ValueError as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _address(text: str, default_port: int) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"'{text}' is not a server's address; allowed: host or host:port, separated by commas")
    return host.removeprefix("[").removesuffix("]"), int(port)


def without_password(url: str) -> str:
    """Return a Redis URL for logs and messages, with the password masked."""
    head, at, tail = url.rpartition("@")
    scheme, separator, credentials = head.partition("://")
    user, colon, _ = credentials.partition(":")
    shown = f"{scheme}{separator}{user}{':***' if colon else ''}@{tail}" if at else url
    return re.sub(r"(password=)[^&]*", r"\1***", shown)


class BrokerSection(Section):
    """[broker]: the Redis server and the limits on what the broker stores there."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis 6.2 or later, or Valkey: redis://, unix://, redis+sentinel://host:port,…/master or "
        "redis+cluster://host:port,…; with TLS rediss://, rediss+sentinel://, rediss+cluster://.",
    )
    redis_timeout: float = Field(5.0, gt=0, description="Seconds to wait for a reply of Redis.")
    redis_connections: int = Field(64, ge=2, description="Maximum connections to one Redis server.")
    max_streams_per_peer: int = Field(
        256, ge=1, description="Maximum open streams of one peer: watchers, results, batches, audits."
    )
    watcher_patience: float = Field(
        30.0, gt=0, description="Seconds that a watcher may take to read a message before its stream is ended."
    )
    redis_replicas: int = Field(
        0, ge=0, description="Replicas that must acknowledge a change (WAIT) before the call that made it returns."
    )
    finished_run_ttl: float = Field(
        0.0, ge=0, description="Seconds after which a run that ended is deleted with all its data; 0: never."
    )
    sweep_interval: float = Field(1.0, gt=0, le=60, description="Seconds between sweeps of expired leases and members.")
    sample_events_per_step: int = Field(2, ge=0, description="Groups per policy version shown as GroupSample events.")
    max_result_bytes: int = Field(
        256 << 20, ge=0, description="Maximum bytes of transcripts kept for CollectResults, per run and purpose."
    )
    max_runs: int = Field(10_000, ge=1, description="Maximum runs, including those that ended and are not deleted.")
    max_prompt_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="Maximum bytes of a run's prompts that are not terminal and of its evaluation sets; each prompt "
        "counts 1 KiB more. Evaluations in progress may take the same amount again.",
    )
    max_evaluation_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Maximum bytes of headers kept of a run's complete evaluations; the oldest evaluations are deleted "
        "first.",
    )
    max_event_bytes: int = Field(
        64 << 20, ge=1 << 20, description="Maximum bytes of a run's events; the oldest are deleted first."
    )
    max_members: int = Field(1024, ge=1, le=4096, description="Maximum live members of a run.")
    max_caller_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Maximum share of a run's prompts and members, and of all runs, that the holder of one certificate "
        "may have. It does not limit the prompts of the run's creator and trainer.",
    )
    any_member_address: bool = Field(
        False, description="Let members register addresses at hosts that their certificates do not name."
    )
    max_first_dead: int = Field(
        20,
        ge=0,
        description="End a run as failed when this many training prompts in a row died of one reason before any group "
        "was stored; 0: never.",
    )
    remembered_lives: int = Field(
        10_000, ge=0, description="Terminal instances whose history a run keeps (`quartet trace`)."
    )
    remembered_instances: int = Field(
        1_000_000, ge=1, description="Terminal instances stored of a run, to recognize repeated submissions."
    )

    @field_validator("redis_url")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        parse(value)
        return value

    @field_serializer("redis_url", when_used="json")
    def _hide_password(self, value: str) -> str:
        return without_password(value)
