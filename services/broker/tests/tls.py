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


class Authority:
    """A CA of a moment: `ca.pem` in a folder, and beside it NAME.pem and NAME-key.pem of each certificate."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        ca = self._builder(self._name, self._key.public_key())
        ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._write("ca", ca)

    def issue(self, file: str, name: str, *alternatives: str) -> None:
        """Sign a certificate for 127.0.0.1 with a common name and further names: URIs (urn:...) and DNS names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        for text in alternatives:
            names.append((x509.UniformResourceIdentifier if text.startswith("urn:") else x509.DNSName)(text))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key())
        self._write(file, builder.add_extension(x509.SubjectAlternativeName(names), critical=False))
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.folder / f"{file}-key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))

    def _builder(self, name: x509.Name, public_key) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        return builder.not_valid_after(now + datetime.timedelta(hours=1))

    def _write(self, file: str, builder: x509.CertificateBuilder) -> None:
        signed = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{file}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def make_certificate(folder: Path) -> ssl.SSLContext:
    """Write ca.pem into the folder; return a server's context with a certificate for 127.0.0.1 signed by it."""
    Authority(folder).issue("redis", "redis")
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
