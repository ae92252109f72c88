"""A connection that the server resets is a failure of the connection, whichever event loop it is on."""

import asyncio
import socket
import struct

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from quartet_broker.config import BrokerSection
from quartet_broker.servers import connect

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"


async def send_after_reset(form: str, tmp_path) -> None:
    """Connect, have the server reset the connection, and send."""
    peers = []

    async def answer(reader, writer) -> None:
        peers.append(writer)
        while sent := await reader.read(4096):
            for command in sent.split(b"*")[1:]:
                writer.write(HELLO if b"HELLO" in command else b"+OK\r\n")

    path = str(tmp_path / "redis.sock")
    if form == "unix":
        server, url = await asyncio.start_unix_server(answer, path), f"unix://{path}"
    else:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        connection = (await connect(BrokerSection(redis_url=url)).any()).connection_pool.make_connection()
        await connection.connect()
        (peer,) = peers
        peer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        peer.transport.abort()
        with pytest.raises(RedisConnectionError):
            while True:  # the first ones may be sent before the event loop sees the reset
                await asyncio.sleep(0)
                await connection.send_packed_command(b"PING\r\n", check_health=False)


@pytest.mark.parametrize("form", ["tcp", "unix"])
@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_sending_to_a_server_that_reset_the_connection_is_a_connection_error(loop, form, tmp_path):
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(send_after_reset(form, tmp_path), 10))
