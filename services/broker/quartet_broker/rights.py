"""The rights at Redis that a broker's user needs, and a check of them that changes nothing.

A server checks a command's rights, with its keys and channels, when it queues it in a transaction, which is discarded.
"""

from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import ExecAbortError, NoPermissionError

from quartet_broker import keys
from quartet_broker.store import Command, execute

_RUN = keys.run("no-such-run")
_CHANNEL = keys.prefix("no-such-run") + "bell"

COMMANDS: Sequence[Command] = (
    ("PING",), ("INFO", "server"), ("DBSIZE",), ("TIME",), ("SCAN", 0),
    ("PUBLISH", _CHANNEL, ""), ("PSUBSCRIBE", keys.CHANNELS), ("PUNSUBSCRIBE", keys.CHANNELS),
    ("EVAL", "return 1", 1, _RUN), ("EVALSHA", "0" * 40, 1, _RUN), ("SCRIPT", "LOAD", "return 1"),
    ("EXISTS", _RUN), ("UNLINK", _RUN), ("RENAME", _RUN, _RUN), ("PERSIST", _RUN),
    ("GET", _RUN), ("MGET", _RUN), ("MSET", _RUN, b""), ("STRLEN", _RUN),
    ("HGET", _RUN, "f"), ("HSET", _RUN, "f", ""), ("HMGET", _RUN, "f"), ("HGETALL", _RUN), ("HDEL", _RUN, "f"),
    ("HEXISTS", _RUN, "f"), ("HKEYS", _RUN), ("HINCRBY", _RUN, "f", 1), ("HSCAN", _RUN, 0),
    ("RPUSH", _RUN, ""), ("LPOP", _RUN), ("LRANGE", _RUN, 0, 1), ("LINDEX", _RUN, 0), ("LLEN", _RUN),
    ("LREM", _RUN, 0, ""),
    ("ZADD", keys.RUNS, 0, "m"), ("ZREM", _RUN, "m"), ("ZSCORE", _RUN, "m"), ("ZMSCORE", _RUN, "m"), ("ZCARD", _RUN),
    ("ZRANGE", _RUN, 0, 1), ("ZREVRANGE", keys.RUNS, 0, 1), ("ZRANGEBYSCORE", _RUN, 0, 1), ("ZPOPMIN", _RUN),
    ("XADD", _RUN, "*", "f", ""), ("XDEL", _RUN, "1-0"), ("XLEN", _RUN), ("XRANGE", _RUN, "-", "+"),
    ("XREVRANGE", _RUN, "+", "-"), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", _RUN, ">"), ("XACK", _RUN, "g", "1-0"),
    ("XGROUP", "CREATE", _RUN, "g", "$"), ("XINFO", "GROUPS", _RUN),
)  # fmt: skip
"""An example of each command that scripts and calls use."""
TRANSACTION = ("MULTI", "EXEC", "DISCARD")
WITH_REPLICAS: Command = ("WAIT", 0, 1)
IN_A_CLUSTER: Command = ("CLUSTER", "SLOTS")
FOR_BACKUPS: Sequence[Command] = (("DUMP", _RUN), ("RESTORE", _RUN, 0, b""))

_SUBCOMMANDS = ("SCRIPT", "XGROUP", "CLUSTER")
"""Commands of which the broker has one subcommand alone."""


def word(command: Command) -> str:
    """Return the word of ACL SETUSER that permits a command."""
    parts = command[:2] if command[0] in _SUBCOMMANDS else command[:1]
    return "+" + "|".join(str(part) for part in parts).lower()


async def missing_rights(server: Redis, commands: Sequence[Command], seconds: float) -> list[str]:
    """Return the words of ACL SETUSER by which the user of `server` may run `commands`; none if it may.

    Raises:
        RedisError or OSError: the server did not answer.
    """
    multi, executed = await execute(server, [("MULTI",), ("EXEC",)], seconds)
    if _is_refused(multi):
        return [f"+{name.lower()}" for name in TRANSACTION]  # without it the commands would be executed
    *answers, discarded = await execute(server, [("MULTI",), *commands, ("DISCARD",)], seconds)
    asked = [(("EXEC",), executed), *zip((("MULTI",), *commands), answers, strict=True), (("DISCARD",), discarded)]
    if _is_refused(discarded):
        await server.connection_pool.disconnect()  # which ends the transaction
    refused = [_lacking(command, answer) for command, answer in asked if _is_refused(answer)]
    return list(dict.fromkeys(refused))


def _is_refused(answer: object) -> bool:
    return isinstance(answer, NoPermissionError) or (isinstance(answer, ExecAbortError) and "NOPERM" in str(answer))


def _lacking(command: Command, error: object) -> str:
    text = str(error)
    if "to run the" in text:
        return word(command)
    return f"&{keys.CHANNELS}" if "channel" in text else f"~{keys.KEYS}"
