"""Redis: round trips, Lua scripts, and the errors that its failures become.

Round trips use the connections of redis-py's pool directly: the client layers above them (pipelines, retries,
telemetry) take a tenth of the broker's processor time at 2 groups a call, and apply callbacks to replies of QUEUED.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quartet_broker import keys, validation
from quartet_broker.config import BrokerSection, without_password
from quartet_broker.errors import other_layout, over_share, run_not_found
from quartet_broker.scripts import Script
from quartet_broker.servers import Key, Servers
from quartet_common.errors import failed_precondition, unavailable
from quartet_common.identity import not_the_owner
from quartet_server.wire import Bytes

Value: TypeAlias = str | Bytes | int | float
Command: TypeAlias = Sequence[Value]
Asked = TypeVar("Asked", Command, Sequence[Command])
"""What has one reply: a command, or the commands of a transaction."""


async def execute(server: Redis, commands: Sequence[Command], seconds: float) -> list[Any]:
    """Return the replies to `commands`; the reply to a command that the server rejects is a ResponseError.

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
    # The caller's timeout covers all replies; the connection's own would start a timer for each.
    limit, connection.socket_timeout = connection.socket_timeout, None
    try:
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        return [await _answer(connection) for _ in commands]
    finally:
        connection.socket_timeout = limit


async def _answer(connection: AbstractConnection) -> Any:
    # Any other exception, CancelledError included, closes the connection, whose unread replies nobody may take.
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


# Redis answers but refuses at present. An error inside a script has the code, or a sentence, somewhere in its message.
_REFUSAL = re.compile(
    r"\b(OOM|READONLY|MISCONF|LOADING|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|ASK|MOVED|NOPERM)\b"
    r"|(non local key)|ACL failure in script|The user executing the script can't"
)
# The error that `run_state` of lua/lib/base.lua raises for a run whose keys another build laid out.
_LAYOUT = re.compile(r"\bLAYOUT (\S+) of (\d+)")
# Refusals which mean that the key has moved to another server, or is about to.
_ELSEWHERE = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "ASK", "MOVED")
AWAY, FULL, REFUSING = "away", "full", "refusing"
_REASONS = {
    "OOM": "OOM, its memory is full: raise its maxmemory, or wait for a commit",
    "READONLY": "READONLY, it is a replica: broker.redis_url names no master",
    "MISCONF": "MISCONF, it cannot save to its disk",
    "NOREPLICAS": "NOREPLICAS, too few replicas are connected",
}
_ATTEMPTS = 4  # of a call that is redirected, or whose script has to be loaded
_SCANNED = 1000


class Store:
    """Runs scripts and commands on Redis, and turns its failures into the contract's errors."""

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
        """Turn failures of Redis into UNAVAILABLE; any other error is a bug and passes through."""
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            self.servers.invalidate()
            self.trouble = AWAY
            raise unavailable(self._where, f"it does not answer: {error}; retry") from error
        except ResponseError as error:
            if layout := _LAYOUT.search(str(error)):
                raise other_layout(*layout.groups()) from error
            refusal = _refusal(error)
            if refusal is None:
                raise
            if refusal in _ELSEWHERE:
                self.servers.invalidate()
            self.trouble = {"LOADING": AWAY, "OOM": FULL}.get(refusal, REFUSING)
            self._refused_for_memory |= refusal == "OOM"
            description = f"it refuses writes ({_REASONS.get(refusal, refusal)}); nothing was changed; retry"
            if refusal == "NOPERM":  # rights were taken away, or its replica that was promoted has other users
                description = "its user lacks a right (NOPERM): grant what quartet-broker --dry-run names; retry"
            raise unavailable(self._where, description) from error

    async def ping(self) -> None:
        """Raise UNAVAILABLE unless every server that holds keys answers."""
        with self.failures():
            await self.servers.refresh()
            await asyncio.gather(*(server.ping() for server in await self.servers.all()))

    async def full(self) -> str:
        """Describe the memory of a server that has reached maxmemory or refused a call for it; "" if none has."""
        refused, self._refused_for_memory = self._refused_for_memory, False
        with self.failures():
            for server in await self.servers.all():
                memory = await server.info("memory")
                used, most = memory["used_memory"], memory["maxmemory"]
                if most and (refused or used - memory.get("mem_not_counted_for_evict", 0) > most):
                    return f"{used >> 20} MiB used, maxmemory is {most >> 20} MiB"
        return ""

    async def run(
        self, script: Script, run_id: str, *arguments: Value, values: Mapping[str, Bytes] | None = None
    ) -> list[Any]:
        """Run one script for a run and return its answer.

        Args:
            values: stored under their keys just before the script, in the same transaction: both happen or neither.
                They do not pass through Lua.

        Raises:
            ContractError: NOT_FOUND if the run does not exist, FAILED_PRECONDITION if it is finished, UNAVAILABLE.
        """
        if not values:
            (reply,) = await self.run_many(script, run_id, [arguments])
            return reply
        key = keys.run(run_id)
        commands: list[Command] = [
            ("MSET", *(part for pair in values.items() for part in pair)),
            # Not EVALSHA: at a server that does not have the script, the values alone would be stored.
            ("EVAL", script.text, 1, key, validation.owner(), *arguments),
        ]
        with self.failures():
            (reply,) = await self._dispatch([key], [commands], self._transact)
        _refuse_common(run_id, reply)
        return reply

    async def run_many(
        self, script: Script, run_id: str, calls: Sequence[Sequence[Value]], missing_ok: bool = False
    ) -> list[list[Any]]:
        """Run one script several times, each atomically, in one round trip. Raises as `run`.

        With `missing_ok` a run that does not exist raises nothing; the replies are NOT_FOUND.
        """
        key = keys.run(run_id)
        commands = [("EVALSHA", script.sha, 1, key, validation.owner(), *call) for call in calls]
        with self.failures():
            replies = await self._dispatch([key] * len(calls), commands, self._write, script)
        for reply in replies:
            if not (missing_ok and reply[0] == b"NOT_FOUND"):
                _refuse_common(run_id, reply)
        return replies

    async def _transact(self, server: Redis, scripts: Sequence[Sequence[Command]]) -> list[Any]:
        """Run each of `scripts` as a transaction; return the replies to their last commands."""
        replies = []
        for commands in scripts:
            answers = await self._write(server, [("MULTI",), *commands, ("EXEC",)])
            refusal = next((answer for answer in answers if isinstance(answer, Exception)), None)
            replies.append(refusal or answers[-1][-1])
        return replies

    async def _dispatch(
        self,
        names: Sequence[Key],
        commands: Sequence[Asked],
        exchange: Callable[[Redis, Sequence[Asked]], Awaitable[list[Any]]],
        script: Script | None = None,
    ) -> list[Any]:
        """Send each command to the server that has its key in `names`; return the replies in order.

        A reply of NOSCRIPT or MOVED means that nothing was done: the command is sent again, to the right server.
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
                if script and any(isinstance(answers[n], NoScriptError) for n in which):
                    await server.script_load(script.text)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _write(self, server: Redis, commands: Sequence[Command]) -> list[Any]:
        """Execute commands that may write; return their replies once `redis_replicas` replicas have the changes."""
        if not self._replicas:
            return await execute(server, commands, self._timeout)
        *answers, reached = await execute(
            server, [*commands, ("WAIT", self._replicas, self._replicas_ms)], self._timeout
        )
        if isinstance(reached, Exception) and not any(isinstance(answer, Exception) for answer in answers):
            raise reached
        if isinstance(reached, int) and reached < self._replicas:
            self.servers.invalidate()  # its replicas may follow another master by now
            self.trouble = REFUSING
            description = (
                f"{reached} of {self._replicas} replicas (broker.redis_replicas) have the change in time; retry"
            )
            raise unavailable(self._where, description)
        return answers

    async def read(self, commands: Iterable[Command]) -> list[Any]:
        """Run commands in one round trip per server; return their replies.

        The first argument of each command is a key; other keys in it must be of the same run.
        """
        wanted = list(commands)
        with self.failures():
            return await self._dispatch(
                [cast(Key, command[1]) for command in wanted], wanted, partial(execute, seconds=self._timeout)
            )

    async def time(self, run_id: str) -> float:
        """Return the clock of the server that has a run's keys, in milliseconds since 1970."""
        with self.failures():
            seconds, microseconds = await (await self.client(run_id)).time()
        return float(seconds * 1000 + microseconds / 1000)

    async def scan(self, run_id: str) -> AsyncIterator[list[bytes]]:
        """Yield a run's keys in portions, by a SCAN of all keys of its server.

        A key may be yielded twice; keys that are created meanwhile may be missing.
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
    """Return the code of an error by which Redis refuses a call for now, None for any other error."""
    code = getattr(error, "status_code", None)
    found = _REFUSAL.search(f"{code or ''} {error}")
    if found is None:
        return None
    return found[1] or ("ASK" if found[2] else "NOPERM")  # a script met a key of a slot that is being moved, or the ACL


def _refuse_common(run_id: str, reply: list[Any]) -> None:
    """Raise the error for a reply whose first word means the same in all scripts."""
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
