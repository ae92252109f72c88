"""Certificates as `quartet certs` makes them, and ones with dates and purposes that it would not write."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from quartet_client.authority import EXPORTED, create_authority, export, issue
from quartet_common.config import SecuritySection


def make(
    folder: Path,
    role: str,
    hosts: Sequence[str] = (),
    dates: tuple[int, int] = (0, 90),
    purposes: Sequence[x509.ObjectIdentifier] = (),
) -> SecuritySection:
    """Make a certificate of `role`, with a CA in folder/pki if there is none, and export it to folder/ROLE.

    Args:
        dates: when it begins and ends, in days from now.
        purposes: of its extended key usage.
    """
    if not (folder / "pki").exists():
        create_authority(folder / "pki")
    issue(folder / "pki", role, [role], hosts)
    sign_again(folder / "pki", role, *dates, purposes)
    export(folder / "pki", role, folder / role)
    ca, certificate, key = (folder / role / name for name in EXPORTED)
    return SecuritySection(tls_ca=ca, tls_certificate=certificate, tls_key=key)


def sign_again(
    folder: Path,
    name: str,
    since: int,
    until: int,
    purposes: Sequence[x509.ObjectIdentifier] = (),
    without: Sequence[str] = (),
) -> None:
    """Sign a certificate of a CA's folder again, valid from `since` to `until` in days from now.

    Args:
        without: hosts to leave out.
    """
    path = folder / f"{name}.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    begin, end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=day) for day in (since, until))
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number, begin, end)
    for extension in old.extensions:
        replaced = purposes and isinstance(extension.value, x509.ExtendedKeyUsage)
        value = x509.ExtendedKeyUsage(purposes) if replaced else extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName(
                [each for each in value if not str(each.value).startswith(tuple(without))] if without else list(value)
            )
        builder = builder.add_extension(value, extension.critical)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
