"""TLS in front of servers that have none: a certificate of a moment, and a proxy that takes TLS and hands on plaintext.

The servers in the wheels are built without TLS. What the broker does with it is the same.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path) -> ssl.SSLContext:
    """Write ca.pem into the folder; return a server's context with a certificate for 127.0.0.1 signed by it."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])

    def builder(name: x509.Name, public_key) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(ca_name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        return builder.not_valid_after(now + datetime.timedelta(hours=1))

    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = builder(ca_name, ca_key.public_key()).add_extension(constraints, critical=True).sign(ca_key, hashes.SHA256())
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redis")])
    certificate = builder(name, key.public_key()).add_extension(loopback, critical=False).sign(ca_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
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
