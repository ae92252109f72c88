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


async def no_handshake(_connection) -> None:
    """Leave the connection as it is: nobody answers a HELLO."""


async def send_after_reset(form: str, tmp_path) -> None:
    """Connect, have the server reset the connection, and send."""
    path = str(tmp_path / "redis.sock")
    listener = socket.socket(socket.AF_UNIX if form == "unix" else socket.AF_INET)
    listener.bind(path if form == "unix" else ("127.0.0.1", 0))
    with listener:
        listener.listen()
        url = f"unix://{path}" if form == "unix" else f"redis://127.0.0.1:{listener.getsockname()[1]}"
        server = await connect(BrokerSection(redis_url=url)).any()
        connection = server.connection_pool.make_connection()
        connection.redis_connect_func = no_handshake
        await connection.connect()
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        peer.close()
        while True:  # the first ones may be sent before the event loop sees the reset
            await asyncio.sleep(0)
            await connection.send_packed_command(b"PING\r\n", check_health=False)


@pytest.mark.parametrize("form", ["tcp", "unix"])
@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_sending_to_a_server_that_reset_the_connection_is_a_connection_error(loop, form, tmp_path):
    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(RedisConnectionError):
        runner.run(asyncio.wait_for(send_after_reset(form, tmp_path), 10))
