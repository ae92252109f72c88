"""redis-py's connections, on uvloop."""

from collections.abc import Iterable

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError


class _OnUvloop(AbstractConnection):
    """A connection whose peer has reset it raises ConnectionError when it sends.

    redis-py handles OSError, which asyncio's transports raise; a closed transport of uvloop raises RuntimeError
    (`UVHandle._ensure_alive` in uvloop/handles/handle.pyx).
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            raise RedisConnectionError("the server reset the connection") from error


class _Tcp(_OnUvloop, Connection):
    pass


class _Tls(_OnUvloop, SSLConnection):
    pass


class _Unix(_OnUvloop, UnixDomainSocketConnection):
    pass


CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
"""The class that takes the place of each of redis-py's."""
