"""Redis: round trips, Lua scripts, and what its failures mean to callers.

Round trips go over the connections of redis-py's pool without the layers of its clients above them (pipelines, retries,
telemetry), which cost a small call as much again as the connection.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quartet_broker import keys, validation
from quartet_broker.config import BrokerSection, without_password
from quartet_broker.errors import other_layout, over_share, run_not_found
from quartet_broker.servers import Key, Servers
from quartet_common.errors import failed_precondition, unavailable
from quartet_common.identity import not_the_owner
from quartet_common.wire import Bytes

# In this order: later parts use earlier ones.
_LIBRARY = ("base", "moments", "life", "settle", "membership", "session")


@dataclass(frozen=True)
class Script:
    """A script's text and the SHA-1 by which Redis calls it."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script `lua/NAME.lua`, library included; what it counted is written when it ends (`finish`)."""
    folder = files("quartet_broker") / "lua"
    library = "".join((folder / "lib" / f"{part}.lua").read_text(encoding="utf-8") for part in _LIBRARY)
    body = (folder / f"{name}.lua").read_text(encoding="utf-8")
    text = f"{library}\nreturn finish((function()\n{body}\nend)())\n"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


Value: TypeAlias = str | Bytes | int | float
Command: TypeAlias = Sequence[Value]
Asked = TypeVar("Asked", Command, Sequence[Command])
"""What has one answer: a command, or those of a transaction."""


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


# Redis answers but cannot write just now. Inside a script the code stands somewhere in the sentence.
_REFUSAL = re.compile(
    r"\b(OOM|READONLY|MISCONF|LOADING|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|ASK|MOVED)\b|non local key"
)
# Raised by a script that met a run whose keys another build laid out; see lua/lib/base.lua.
_LAYOUT = re.compile(r"\bLAYOUT (\S+) of (\d+)")
# Of these, what says that the key's server is another now, or soon will be.
_ELSEWHERE = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "ASK", "MOVED")
AWAY, FULL, REFUSING = "away", "full", "refusing"
_REASONS = {
    "OOM": "OOM, its memory is full: raise its maxmemory, or wait for a commit",
    "READONLY": "READONLY, it is a replica: broker.redis_url names no master",
    "MISCONF": "MISCONF, it cannot save to its disk",
    "NOREPLICAS": "NOREPLICAS, too few replicas are connected",
}
_ATTEMPTS = 4  # at servers that say where the run is now
_SCANNED = 1000


class Store:
    """Runs scripts and commands on Redis, with its failures turned into the contract's errors."""

    def __init__(self, servers: Servers, section: BrokerSection):
        self.servers = servers
        self._where = f"Redis at {without_password(section.redis_url)}"
        self._timeout = section.redis_timeout
        self.trouble = ""
        """What the last failure was: AWAY, FULL or REFUSING."""
        self._refused_for_memory = False
        self._replicas = section.redis_replicas
        self._replicas_ms = int(section.redis_timeout * 800)  # so that Redis answers before we give up

    async def client(self, run_id: str) -> Redis:
        """Return the server that has a run's keys. Use it within `failures`."""
        return await self.servers.of(keys.run(run_id))

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn failures of Redis into UNAVAILABLE; what is a fault of ours stays as it is."""
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            self.servers.doubt()
            self.trouble = AWAY
            raise unavailable(self._where, f"it does not answer: {error}; retry") from error
        except ResponseError as error:
            if layout := _LAYOUT.search(str(error)):
                raise other_layout(*layout.groups()) from error
            refusal = _refusal(error)
            if refusal is None:
                raise
            if refusal in _ELSEWHERE:
                self.servers.doubt()
            self.trouble = {"LOADING": AWAY, "OOM": FULL}.get(refusal, REFUSING)
            self._refused_for_memory |= refusal == "OOM"
            description = f"it refuses writes ({_REASONS.get(refusal, refusal)}); nothing was changed; retry"
            raise unavailable(self._where, description) from error

    async def ping(self) -> None:
        """Raise UNAVAILABLE unless Redis answers; of several servers, each that has keys."""
        with self.failures():
            await self.servers.look()
            await asyncio.gather(*(server.ping() for server in await self.servers.all()))

    async def full(self) -> str:
        """Return how full a server is that has reached its maxmemory, or refused a call for that; else nothing."""
        refused, self._refused_for_memory = self._refused_for_memory, False
        with self.failures():
            for server in await self.servers.all():
                memory = await server.info("memory")
                used, most = memory["used_memory"], memory["maxmemory"]
                if most and (refused or used - memory.get("mem_not_counted_for_evict", 0) > most):
                    return f"{used >> 20} MiB used, maxmemory is {most >> 20} MiB"
        return ""

    async def run(
        self, name: str, run_id: str, *arguments: Value, values: Mapping[str, Bytes] | None = None
    ) -> list[Any]:
        """Run one script for a run and return its answer.

        Args:
            values: what is stored just before, by key of the run, in one transaction with the script: both are done, or
                neither is. It does not pass through Lua.

        Raises:
            ContractError: NOT_FOUND if the run does not exist, FAILED_PRECONDITION if it is finished, UNAVAILABLE.
        """
        if not values:
            (reply,) = await self.run_many(name, run_id, [arguments])
            return reply
        key = keys.run(run_id)
        commands: list[Command] = [
            ("MSET", *(part for pair in values.items() for part in pair)),
            # The text, not its SHA: a server that has forgotten the script would store the values all the same.
            ("EVAL", script(name).text, 1, key, validation.owner(), *arguments),
        ]
        with self.failures():
            (reply,) = await self._ask([key], [commands], self._transact)
        _refuse_common(run_id, reply)
        return reply

    async def run_many(
        self, name: str, run_id: str, calls: Sequence[Sequence[Value]], missing_ok: bool = False
    ) -> list[list[Any]]:
        """Run one script several times, each atomically, in one round trip. Raises as `run`.

        With `missing_ok` a run that does not exist is no error: the script's answer tells.
        """
        chosen, key = script(name), keys.run(run_id)
        commands = [("EVALSHA", chosen.sha, 1, key, validation.owner(), *call) for call in calls]
        with self.failures():
            replies = await self._ask([key] * len(calls), commands, self._trip, chosen)
        for reply in replies:
            if not (missing_ok and reply[0] == b"NOT_FOUND"):
                _refuse_common(run_id, reply)
        return replies

    async def _transact(self, server: Redis, scripts: Sequence[Sequence[Command]]) -> list[Any]:
        """Carry out commands in a transaction, for each of `scripts`; return what the last of each answers."""
        replies = []
        for commands in scripts:
            answers = await self._trip(server, [("MULTI",), *commands, ("EXEC",)])
            refusal = next((answer for answer in answers if isinstance(answer, Exception)), None)
            replies.append(refusal or answers[-1][-1])
        return replies

    async def _ask(
        self,
        names: Sequence[Key],
        commands: Sequence[Asked],
        exchange: Callable[[Redis, Sequence[Asked]], Awaitable[list[Any]]],
        chosen: Script | None = None,
    ) -> list[Any]:
        """Return the answers to commands, in order; each goes to the server that has its key, of `names`.

        A server that has forgotten the script, or that says where the run is now, did nothing: go on there.
        """
        answers: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        for _ in range(_ATTEMPTS):
            places: dict[Redis, list[int]] = {}
            for n in left:
                places.setdefault(await self.servers.of(names[n]), []).append(n)
            asked = [exchange(server, [commands[n] for n in which]) for server, which in places.items()]
            found = await asyncio.gather(*asked) if len(asked) > 1 else [await each for each in asked]
            for which, came in zip(places.values(), found, strict=True):
                for n, answer in zip(which, came, strict=True):
                    answers[n] = answer
            left = [n for n in left if isinstance(answers[n], NoScriptError | MovedError)]
            if not left:
                break
            for server, which in places.items():
                for n in which:
                    if isinstance(answers[n], MovedError):
                        await self.servers.moved(answers[n])
                if chosen and any(isinstance(answers[n], NoScriptError) for n in which):
                    await server.script_load(chosen.text)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _trip(self, server: Redis, commands: Sequence[Command]) -> list[Any]:
        """Make changes; the answers to the commands, when enough replicas have what was changed."""
        if not self._replicas:
            return await execute(server, commands, self._timeout)
        *answers, reached = await execute(
            server, [*commands, ("WAIT", self._replicas, self._replicas_ms)], self._timeout
        )
        if isinstance(reached, Exception) and not any(isinstance(answer, Exception) for answer in answers):
            raise reached
        if isinstance(reached, int) and reached < self._replicas:
            self.servers.doubt()  # this may be a master that has lost its replicas to another
            self.trouble = REFUSING
            description = (
                f"{reached} of {self._replicas} replicas (broker.redis_replicas) have the change in time; retry"
            )
            raise unavailable(self._where, description)
        return answers

    async def read(self, commands: Iterable[Command]) -> list[Any]:
        """Run commands in one round trip, to each server those for its keys; their answers, as the server gives them.

        The first argument of each command is a key; if it has more, they are of the same run.
        """
        wanted = list(commands)
        with self.failures():
            return await self._ask(
                [cast(Key, command[1]) for command in wanted], wanted, partial(execute, seconds=self._timeout)
            )

    async def time(self, run_id: str) -> float:
        """Return the clock of the server that has a run's keys, in milliseconds since 1970."""
        with self.failures():
            seconds, microseconds = await (await self.client(run_id)).time()
        return float(seconds * 1000 + microseconds / 1000)

    async def scan(self, run_id: str) -> AsyncIterator[list[bytes]]:
        """Yield the keys of a run, some at a time, a key perhaps twice; those that come meanwhile may be missing.

        It goes through all the keys of the run's server, a thousand at a time.
        """
        cursor = 0
        with self.failures():
            server = await self.client(run_id)
            while True:
                command = ("SCAN", cursor, "MATCH", keys.prefix(run_id) + "*", "COUNT", _SCANNED)
                cursor, found = await server.execute_command(*command)
                yield found
                if cursor == 0:
                    return


def _refusal(error: ResponseError) -> str | None:
    """Return the code of an error by which Redis refuses just now, None if it is another."""
    code = getattr(error, "status_code", None)
    found = _REFUSAL.search(f"{code or ''} {error}")
    if found is None:
        return None
    return found[1] or "ASK"  # a script met a key of a slot that is being moved


def _refuse_common(run_id: str, reply: list[Any]) -> None:
    """Raise what the first word of a script's answer means, where it means the same for all scripts."""
    match reply[0]:
        case b"NOT_FOUND":
            raise run_not_found(run_id)
        case b"FINISHED":
            raise failed_precondition(f"run '{run_id}'", f"it is finished ({reply[1].decode()})")
        case b"OVER_SHARE":
            kind, held, most = reply[1].decode(), *reply[2:]
            what = "bytes of prompts" if kind == "bytes" else kind
            raise over_share(f"{what} of run '{run_id}'", held, most, None if kind == "members" else 1.0)
        case b"DENIED":
            raise not_the_owner(f"{reply[1].decode()} (run '{run_id}')", reply[2].decode())
