"""A lower bound of a gRPC broker in Python: `broker_relay.py PORT REDIS_URL`, run in the broker's environment.

It relays the groups of a call from a producer to a Redis stream, and from there to a consumer, as bytes that it does
not parse. The server is like the broker's: grpc.aio on uvloop, the same options and Redis client. It has no leases, no
deduplication, no staleness and no manifests, and acknowledges entries before the consumer has received them.
"""

import asyncio
import struct
import sys
from collections.abc import Iterable, Sequence

import grpc

SERVICE = "quartet.benchmark.Relay"
GROUP = "trainer"
BLOCK_MS = 30_000
_LENGTH = struct.Struct("<I")


def pack(parts: Iterable[bytes]) -> bytes:
    """Return the parts as one message: each after its length, four bytes."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(message: bytes) -> list[bytes]:
    """Return the parts of a message."""
    parts, at = [], 0
    while at < len(message):
        (length,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        parts.append(message[at : at + length])
        at += length
    return parts


async def serve(port: int, url: str) -> None:
    """Relay until killed."""
    from redis.asyncio import Redis

    from quartet_broker.store import Command, execute
    from quartet_common.channel import channel_options

    redis = Redis.from_url(url, protocol=2)

    async def ask(commands: Sequence[Command]) -> list:
        answers = await execute(redis, commands, 2 * BLOCK_MS / 1000)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def put(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        stream, *groups = unpack(request)
        await ask([("XADD", stream, "*", "group", group) for group in groups])
        return b""

    async def take(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        stream, count = unpack(request)
        read = ("XREADGROUP", "GROUP", GROUP, "one", "COUNT", count, "BLOCK", BLOCK_MS, "STREAMS", stream, ">")
        (((_, entries),),) = await ask([read])
        ids = [entry_id for entry_id, _ in entries]
        await ask([("XACK", stream, GROUP, *ids), ("XDEL", stream, *ids)])
        return pack(fields[1] for _, fields in entries)

    server = grpc.aio.server(options=channel_options())
    methods = {"Put": grpc.unary_unary_rpc_method_handler(put), "Take": grpc.unary_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    from quartet_server.process import keep_freed_memory

    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), sys.argv[2]))
