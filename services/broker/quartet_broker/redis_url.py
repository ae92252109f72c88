"""What `broker.redis_url` says: which servers, reached how, and in which form of Redis.

redis://[user:password@]host[:port][/db]          one server (rediss:// with TLS, unix:///path by socket)
redis+sentinel://host[:port],…/service[/db]       the master that Sentinels name
redis+cluster://host[:port],…                     the nodes of a Cluster; one that answers is enough
"""

import re
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import parse_url

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
    """A URL taken apart.

    Attributes:
        form: "single", "sentinel" or "cluster".
        addresses: servers to ask where things are; empty for a single one.
        service: the master's name at the Sentinels.
        options: arguments of a connection to a server that has data; of a single one with its address.
        sentinel_options: arguments of a connection to a Sentinel.
    """

    form: str
    addresses: tuple[Address, ...]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse(url: str) -> RedisUrl:
    """Take a URL apart. Raises ValueError, with a sentence that has no password in it."""
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
    """Return a Redis URL fit for logs and messages. Of one that cannot be read, rather too little is left."""
    head, at, tail = url.rpartition("@")
    scheme, separator, credentials = head.partition("://")
    user, colon, _ = credentials.partition(":")
    shown = f"{scheme}{separator}{user}{':***' if colon else ''}@{tail}" if at else url
    return re.sub(r"(password=)[^&]*", r"\1***", shown)
