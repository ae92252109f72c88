"""Round trips to a server: commands sent together, their answers in order; the Lua scripts that are sent.

It goes over the connections of redis-py's pool without the layers of its clients above them (pipelines, retries,
telemetry), which cost a small call as much again as the connection.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quartet_common.wire import Bytes

# In this order: later parts use earlier ones.
_LIBRARY = ("base", "moments", "life", "settle", "membership", "session")


@dataclass(frozen=True)
class Script:
    """A script's text and the SHA-1 by which Redis calls it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script `lua/NAME.lua`, library included; what it counted is written when it ends (`finish`)."""
    folder = files("quartet_broker") / "lua"
    library = "".join((folder / "lib" / f"{part}.lua").read_text(encoding="utf-8") for part in _LIBRARY)
    body = (folder / f"{name}.lua").read_text(encoding="utf-8")
    text = f"{library}\nreturn finish((function()\n{body}\nend)())\n"
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


Value = str | Bytes | int | float
Command = Sequence[Value]


async def execute(server: Redis, commands: Sequence[Command], seconds: float) -> list[Any]:
    """Return the answers to `commands`; one by which the server refuses a command is a ResponseError among them.

    Raises:
        RedisError or OSError: the server could not be reached, or did not answer in `seconds`; whether it carried out
            any of the commands is not known.
    """
    pool = server.connection_pool
    connection = await pool.get_connection()
    try:
        try:
            async with asyncio.timeout(seconds):
                return await _exchange(connection, commands)
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer in {seconds:g} s") from error
    finally:
        await pool.release(connection)


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    # One limit for all answers, the caller's: the connection's own would start a timer for each answer.
    limit, connection.socket_timeout = connection.socket_timeout, None
    try:
        # The transport takes views as well as bytes; redis-py's annotation names bytes alone.
        await connection.send_packed_command(cast(list[bytes], _pack(commands)), check_health=False)
        return [await _answer(connection) for _ in commands]
    finally:
        connection.socket_timeout = limit


def _pack(commands: Iterable[Command]) -> list[Bytes]:
    pieces: list[Bytes] = []
    for command in commands:
        if command[0] == "MSET":
            pieces += _pack_values(command)
        else:
            pieces.append(hiredis.pack_command(tuple(command)))  # in C: scripts have hundreds of arguments
    return pieces


def _pack_values(command: Command) -> Iterator[Bytes]:
    """Yield MSET in pieces: each value is one of its own, and so not copied."""
    between = b"*%d\r\n$4\r\nMSET\r\n" % len(command)
    names, values = cast(Sequence[str], command[1::2]), cast(Sequence[Bytes], command[2::2])
    for name, value in zip(names, values, strict=True):
        key = name.encode()
        yield b"%b$%d\r\n%b\r\n$%d\r\n" % (between, len(key), key, len(value))
        yield value
        between = b"\r\n"
    yield between


async def _answer(connection: AbstractConnection) -> Any:
    # Whatever else is raised, a cancellation too, closes the connection: later answers would be taken for others'.
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
