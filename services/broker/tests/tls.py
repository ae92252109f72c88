"""TLS in front of servers that have none: a certificate of a moment, and a proxy that takes TLS and hands on plaintext.

The servers in the wheels are built without TLS. What the broker does with it is the same.
"""

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "client"))
from quartet_client.authority import create_authority, export, issue  # noqa: E402, F401 (needs nothing of the client's)


def make_certificate(folder: Path) -> ssl.SSLContext:
    """Write ca.pem into the folder; return a server's context with a certificate for 127.0.0.1 signed by it."""
    create_authority(folder)
    issue(folder, "redis", ["broker"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "redis.pem", folder / "redis-key.pem")
    return context


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, context: ssl.SSLContext, own_port: int = 0) -> AsyncIterator[int]:
    """Listen with TLS at a port of the loopback (yielded), and pass everything on to another."""
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, other_writer))
        await asyncio.gather(pass_on(reader, other_writer), pass_on(other_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", own_port, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
