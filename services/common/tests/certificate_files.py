"""Certificates as `quartet certs` makes them, and ones whose dates it would not write."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from quartet_client.authority import create_authority, issue
from quartet_common.config import SecuritySection


def make(folder: Path, role: str = "reward", hosts: tuple[str, ...] = (), days: int = 90) -> SecuritySection:
    """Make a CA in `folder` and a certificate of `role`."""
    if not (folder / "ca.pem").exists():
        create_authority(folder)
    issue(folder, role, [role], hosts, days)
    return held(folder, role)


def held(folder: Path, name: str) -> SecuritySection:
    """Return what names the certificate `name` of a folder."""
    files = folder / f"{name}.pem", folder / f"{name}-key.pem"
    return SecuritySection(tls_ca=folder / "ca.pem", tls_certificate=files[0], tls_key=files[1])


def sign_again(folder: Path, name: str, since: int, until: int, **usage: object) -> None:
    """Sign a certificate again, valid from `since` to `until` in days from now.

    Args:
        usage: `purposes`, the object identifiers of its extended key usage in place of its own.
    """
    path = folder / f"{name}.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    begin, end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=day) for day in (since, until))
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number, begin, end)
    for extension in old.extensions:
        value = extension.value
        if "purposes" in usage and isinstance(value, x509.ExtendedKeyUsage):
            value = x509.ExtendedKeyUsage(usage["purposes"])
        builder = builder.add_extension(value, extension.critical)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
