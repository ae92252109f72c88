"""Redis, and what its failures mean to callers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quartet_broker import keys
from quartet_broker.config import BrokerSection, without_password
from quartet_broker.scripts import script
from quartet_common.errors import ContractError, failed_precondition, not_found, unavailable

Value = str | bytes | int | float

# Redis answers but cannot write just now. Inside a script the code stands somewhere in the sentence.
_REFUSAL = re.compile(r"\b(OOM|READONLY|MISCONF|LOADING|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY)\b")
# The client has taken the code off the sentence where it knows it.
_REFUSAL_TYPES = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY"}


def connect(section: BrokerSection, **options: Any) -> Redis:
    """Return a Redis client. It never retries by itself: callers are told UNAVAILABLE, and know what is idempotent."""
    pool = BlockingConnectionPool.from_url(
        section.redis_url,
        max_connections=section.redis_connections,
        timeout=section.redis_timeout,
        socket_timeout=section.redis_timeout,
        socket_connect_timeout=section.redis_timeout,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
    return Redis.from_pool(pool)


class Store:
    """Runs scripts and commands on Redis, with its failures turned into the contract's errors."""

    def __init__(self, redis: Redis, section: BrokerSection):
        self.redis = redis
        self._where = f"Redis at {without_password(section.redis_url)}"

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn failures of Redis into UNAVAILABLE; what is a fault of ours stays as it is."""
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise unavailable(self._where, f"it does not answer: {error}; retry") from error
        except ResponseError as error:
            refusal = _REFUSAL_TYPES.get(type(error)) or _REFUSAL.search(str(error))
            if refusal is None:
                raise
            code = refusal if isinstance(refusal, str) else refusal[0]
            raise unavailable(self._where, f"it refuses writes ({code}); nothing was changed; retry") from error

    async def ping(self) -> None:
        """Raise UNAVAILABLE unless Redis answers."""
        with self.failures():
            await self.redis.ping()

    async def run(self, name: str, run_id: str, *arguments: Value) -> list[Any]:
        """Run one script for a run and return its answer.

        Raises:
            ContractError: NOT_FOUND if the run does not exist, FAILED_PRECONDITION if it is finished, UNAVAILABLE.
        """
        (reply,) = await self.run_many(name, run_id, [arguments])
        return reply

    async def run_many(
        self, name: str, run_id: str, calls: Sequence[Sequence[Value]], missing_ok: bool = False
    ) -> list[list[Any]]:
        """Run one script several times, each atomically, in one round trip. Raises as `run`.

        With `missing_ok` a run that does not exist is no error: the script's answer tells.
        """
        chosen, key = script(name), keys.run(run_id)
        with self.failures():
            replies = await self._evaluate(chosen.sha, key, calls)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                # A Redis that was restarted has forgotten the scripts; a call that found none did nothing.
                await self.redis.script_load(chosen.text)
                missed = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                again = await self._evaluate(chosen.sha, key, [calls[n] for n in missed])
                for n, reply in zip(missed, again, strict=True):
                    replies[n] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        for reply in replies:
            if not (missing_ok and reply[0] == b"NOT_FOUND"):
                _refuse_common(run_id, reply)
        return replies

    async def _evaluate(self, sha: str, key: str, calls: Sequence[Sequence[Value]]) -> list[Any]:
        if len(calls) == 1:
            try:
                return [await self.redis.evalsha(sha, 1, key, *calls[0])]
            except NoScriptError as error:
                return [error]
        async with self.redis.pipeline(transaction=False) as pipeline:
            for arguments in calls:
                pipeline.evalsha(sha, 1, key, *arguments)
            return await pipeline.execute(raise_on_error=False)

    async def read(self, commands: Iterable[tuple[Value, ...]]) -> list[Any]:
        """Run read commands in one round trip; their raw answers, in order."""
        with self.failures():
            async with self.redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()


def _refuse_common(run_id: str, reply: list[Any]) -> None:
    """Raise what the first word of a script's answer means, where it means the same for all scripts."""
    match reply[0]:
        case b"NOT_FOUND":
            raise run_not_found(run_id)
        case b"FINISHED":
            raise failed_precondition(f"run '{run_id}'", f"it is finished ({reply[1].decode()})")


def run_not_found(run_id: str) -> ContractError:
    """Return the error about a run that does not exist."""
    return not_found("run", run_id, "make it with CreateRun")


__all__ = ["RedisError", "Store", "connect", "run_not_found"]
