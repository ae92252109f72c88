"""A small certificate authority for the services of one deployment: mutual TLS without a PKI.

A folder holds the CA (`ca.pem`, `ca-key.pem`) and, for each name, `NAME.pem` and `NAME-key.pem`. A certificate has the
hosts and the roles of its holder (`quartet_common.identity`). Keys are P-256, files that hold one are readable by their
owner alone, and files are replaced atomically, so that running services can reload them. The CA's key stays in that
folder: a service gets a folder of its own (`export`).
"""

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quartet_client.errors import InputError
from quartet_common.identity import ROLE_URI, ROLES, SERVER_DOMAIN, SERVERS, roles_of, server_name

CA_DAYS = 3650
CERTIFICATE_DAYS = 90
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")

EXPORTED = ("ca.crt", "tls.crt", "tls.key")
"""The files of a service's folder, named as in a TLS secret of Kubernetes."""


@dataclass(frozen=True)
class CertificateInfo:
    """The contents of a certificate."""

    name: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    not_after: datetime.datetime  # UTC
    server_roles: tuple[str, ...] = ()
    """Roles of servers that callers can check by its names."""

    def days_left(self) -> float:
        """Days until it expires; negative when it has."""
        return (self.not_after - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def create_authority(folder: Path, days: int = CA_DAYS) -> None:
    """Make a CA in `folder`, which is created if needed.

    Raises:
        InputError: there is a CA already (its certificates would become invalid), or it cannot be written.
    """
    if (folder / "ca-key.pem").exists():
        raise InputError(f"'{folder}' holds a CA already; a new one would make all its certificates worthless")
    key = ec.generate_private_key(ec.SECP256R1())
    # Unique, so that TLS finds the issuer of a certificate where a service trusts two CAs.
    common_name = f"Quartet CA {secrets.token_hex(4)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    _write_pair(folder, "ca", _sign_authority(name, key, days), key)


def renew_authority(folder: Path) -> CertificateInfo:
    """Renew the CA's certificate with the same key: certificates that it signed stay valid.

    Raises:
        InputError: no CA there, or files that cannot be read or written.
    """
    ca, key = _read_authority(folder)
    certificate = _sign_authority(ca.subject, key, CA_DAYS)
    _write_pair(folder, "ca", certificate, key)
    return _info(certificate)


def _sign_authority(name: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    return (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def issue(
    folder: Path, name: str, roles: Sequence[str], hosts: Sequence[str] = (), days: int = CERTIFICATE_DAYS
) -> CertificateInfo:
    """Sign a certificate `name` with the CA of `folder`; an existing one is replaced.

    Args:
        folder: of `create_authority`.
        name: of its files and its common name: lower-case letters, digits, dots, dashes.
        roles: of `quartet_common.identity.ROLES`, at least one.
        hosts: names and IP addresses it answers at; `localhost`, 127.0.0.1 and ::1 are always among them.
        days: of validity, 1 to 825.

    Raises:
        InputError: a value that is not allowed, no CA there, or files that cannot be read or written.
    """
    if not _NAME.fullmatch(name) or name == "ca":
        raise InputError(f"name is '{name}'; allowed: lower-case letters, digits, dots and dashes, and not 'ca'")
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise InputError(f"role is '{', '.join(unknown)}'; allowed: {', '.join(ROLES)}")
    if not 1 <= days <= 825:
        raise InputError(f"days is {days}; allowed: 1 to 825")
    ca, ca_key = _read_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    all_hosts = list(dict.fromkeys(["localhost", "127.0.0.1", "::1", *hosts]))
    alternatives = [_host(host) for host in all_hosts]
    alternatives += [x509.DNSName(server_name(host, role)) for role in SERVERS if role in roles for host in all_hosts]
    alternatives += [x509.UniformResourceIdentifier(ROLE_URI + role) for role in dict.fromkeys(roles)]
    certificate = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        # A service is a server and a client.
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_pair(folder, name, certificate, key)
    return _info(certificate)


def export(folder: Path, name: str, into: Path, owner: int | None = None) -> list[Path]:
    """Write what the holder of certificate `name` needs, and nothing else, into a folder of its own.

    Args:
        folder: of `create_authority`.
        name: of a certificate there.
        into: created if needed; its files are replaced.
        owner: the user who will read them; None: whoever calls this.

    Returns: the files, those of EXPORTED.

    Raises:
        InputError: no such certificate, the folder of the CA itself or one of other files, or files that cannot be
            written or given away.
    """
    if into.resolve() == folder.resolve() or (into / "ca-key.pem").exists():
        raise InputError(f"'{into}' holds the CA's private key; export into a folder of its own")
    if name == "ca":
        raise InputError("name is 'ca'; allowed: the name of a certificate that the CA signed")
    try:
        contents = [(folder / file).read_bytes() for file in ("ca.pem", f"{name}.pem", f"{name}-key.pem")]
    except OSError as error:
        raise InputError(f"the certificate '{name}' in '{folder}' cannot be read: {error}") from error
    files = [into / file for file in EXPORTED]
    try:
        into.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(into))
        if names.difference(EXPORTED) and "tls.key" not in names:  # it becomes the owner's alone
            raise InputError(f"'{into}' holds other files; name a folder of its own")
        into.chmod(0o700)
        for file, content in zip(files, contents, strict=True):
            _replace(file, content, 0o400 if file.suffix == ".key" else 0o444, owner)
        if owner is not None:
            os.chown(into, owner, -1)
    except OSError as error:
        raise InputError(f"cannot write '{name}' into '{into}': {error.strerror}") from error
    return files


def read_info(path: Path) -> CertificateInfo:
    """Read a PEM certificate. Raises InputError if it cannot be read."""
    return _info(_read_certificate(path))


def _info(certificate: x509.Certificate) -> CertificateInfo:
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    hosts: list[str] = []
    roles: frozenset[str] = frozenset()
    proofs: tuple[str, ...] = ()
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        pass  # a CA has none
    else:
        dns = [str(host) for host in names.get_values_for_type(x509.DNSName)]
        proofs = tuple(role for role in SERVERS if any(host.endswith(f".{role}.{SERVER_DOMAIN}") for host in dns))
        hosts = [host for host in dns if not host.endswith("." + SERVER_DOMAIN)]
        hosts += [str(host) for host in names.get_values_for_type(x509.IPAddress)]
        roles = roles_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    return CertificateInfo(
        name=str(common[0].value) if common else "",
        roles=tuple(sorted(roles)),
        hosts=tuple(hosts),
        not_after=certificate.not_valid_after_utc,
        server_roles=proofs,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # then it is a name
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise InputError(f"host is '{host}'; allowed: a DNS name or an IP address")
    return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(**given: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = folder / "ca-key.pem"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise InputError(f"'{folder}' holds no CA; make one with `quartet certs init {folder}`") from error
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"the CA's key '{path}' cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"the CA's key '{path}' is no elliptic-curve key; allowed: one of `quartet certs init`")
    return _read_certificate(folder / "ca.pem"), key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"the certificate '{path}' cannot be read: {error}") from error


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        _replace(folder / f"{name}-key.pem", secret, 0o600)
        _replace(folder / f"{name}.pem", certificate.public_bytes(pem), 0o644)
    except OSError as error:
        raise InputError(f"cannot write '{name}' into '{folder}': {error.strerror}") from error


def _replace(path: Path, content: bytes, mode: int, owner: int | None = None) -> None:
    """Replace a file atomically; it belongs to `owner`, by default to the owner of the replaced file."""
    writing = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            if owner is not None:
                os.fchown(file.fileno(), owner, -1)
            elif os.geteuid() == 0 and path.exists():
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
        os.replace(writing, path)
    except OSError:
        writing.unlink(missing_ok=True)
        raise
