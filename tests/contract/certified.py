"""A server that has a certificate, and what a caller needs to reach it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quartet_common.config import SecuritySection, ServerSection
from quartet_server.host import ServiceHost


def held(folder: Path, name: str, ca: Path | None = None) -> SecuritySection:
    """Return the certificate `name` of a folder, with the folder's own CA if no other is given."""
    files = {"tls_ca": ca or folder / "ca.pem", "tls_certificate": folder / f"{name}.pem"}
    return SecuritySection(**files, tls_key=folder / f"{name}-key.pem")


@asynccontextmanager
async def serving(
    security: SecuritySection, kind: str = "broker", address: str = "127.0.0.1:0", add=lambda server: None
) -> AsyncIterator[ServiceHost]:
    """A running host; `add` gives its server a service."""
    host = ServiceHost(kind, address, security, ServerSection(metrics=False))
    add(host.server)
    await host.start()
    try:
        yield host
    finally:
        await host.drain()
