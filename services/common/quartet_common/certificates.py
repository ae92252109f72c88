"""Certificates on disk, and their rotation without a restart.

A set is three files (CA, certificate, key), which are replaced one after another. While key and certificate do not
match, the new set is incomplete, and the previous one stays in use.
"""

import re
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc

from quartet_common.config import ConfigError, SecuritySection, split_address
from quartet_common.disk import warn_of_open_secret
from quartet_common.identity import roles_of, server_name
from quartet_common.log import get_logger

log = get_logger(__name__)

_FILES = ("tls_ca", "tls_certificate", "tls_key")
_CHECK_SECONDS = 1.0
_SOON = 0.2
"""Share of its life that a certificate should have left when a service starts."""
_CALLERS = ("rollout", "trainer")
"""Services that call others."""
_KEY_BYTES = 1 << 16  # a PEM key is smaller
_PEM_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

ChannelT = TypeVar("ChannelT")


@dataclass(frozen=True)
class Certificates:
    """A set as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes


def read_certificates(security: SecuritySection) -> Certificates:
    """Return the set of files. Raises ConfigError naming the file that cannot be used."""
    pems = []
    for name in _FILES:
        path = getattr(security, name)
        try:
            pems.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"security.{name}: cannot read '{path}': {error.strerror}") from error
    _check(security)
    return Certificates(*pems)


def _check(security: SecuritySection) -> None:
    """Check the files here: gRPC would only report a failed handshake, to the other side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cafile=security.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"security.tls_ca: '{security.tls_ca}' holds no PEM certificate") from error
    try:
        # Without `password`, OpenSSL would prompt on the terminal for that of an encrypted key.
        context.load_cert_chain(str(security.tls_certificate), str(security.tls_key), password=lambda: b"")
    except ssl.SSLError as error:
        reason = "are not of one pair" if error.reason == "KEY_VALUES_MISMATCH" else "hold no usable PEM"
        raise ConfigError(
            f"security.tls_certificate, security.tls_key: '{security.tls_certificate}' and '{security.tls_key}' "
            f"{reason}; allowed: a PEM certificate and its unencrypted PEM key"
        ) from error


def check_service_files(security: SecuritySection, kind: str, host: str) -> None:
    """Check a service's files: its set, its certificate as peers will, and that the CA's private key is not in the same
    folders. Warn of a certificate that expires soon and of a key that any user may read.

    Args:
        kind: the service.
        host: by which others call it; "": not known.

    Raises:
        ConfigError: a file cannot be used, peers would refuse the certificate, or this process can read the CA's key.
    """
    read_certificates(security)
    warn_of_open_secret("security.tls_key", Path(str(security.tls_key)))
    folders = {Path(str(getattr(security, name))).parent for name in _FILES}
    for path in sorted(file for folder in folders for file in _files(folder)):
        if _is_key_of_ca(security, path):
            raise ConfigError(
                f"security.tls_key: '{path}' is the private key of the CA, by which any role can be signed; allowed: "
                "a folder with the service's own key and certificate and the CA's certificate "
                "(quartet certs export SERVICE FOLDER)"
            )
    _check_as_peers(security, kind, host)


def _check_as_peers(security: SecuritySection, kind: str, host: str) -> None:
    where = f"security.tls_certificate: '{security.tls_certificate}'"
    name = (name_to_check(security, f"{host}:0", kind) or host) if host else None
    try:
        found = handshake_with_itself(security, name, as_client=kind in _CALLERS)
    except ssl.SSLCertVerificationError as error:
        wanted = f"a {kind} at '{host}'; issue it with --role {kind} --host {host}, or correct [addresses]"
        raise ConfigError(f"{where} {certificate_fault(error, wanted)}") from error
    roles = roles_of(value for _, value in found.get("subjectAltName", ()))
    if security.roles and kind not in roles:
        raise ConfigError(
            f"{where} has {'the role ' + ', '.join(sorted(roles)) if roles else 'no role'}; allowed: {kind} (issue it "
            f"with --role {kind}), or security.roles = false"
        )
    begin, end = (ssl.cert_time_to_seconds(found[date]) for date in ("notBefore", "notAfter"))
    if (left := end - time.time()) < _SOON * (end - begin):
        log.warning("%s expires in %.1f days: renew it", where, left / 86400)


def handshake_with_itself(
    security: SecuritySection, name: str | None = None, as_client: bool = False
) -> dict[str, Any]:
    """Return the set's certificate, as `SSLSocket.getpeercert`, after a handshake under its own CA.

    Args:
        name: that the certificate must be for; None: any.
        as_client: the certificate must be good for a client, too.

    Raises:
        ssl.SSLCertVerificationError: a peer with the same CA would refuse it.
    """
    client = ssl.create_default_context(cafile=security.tls_ca)
    client.check_hostname = name is not None
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=security.tls_ca)
    for end in (client, server):
        end.load_cert_chain(str(security.tls_certificate), security.tls_key)
    if as_client:
        server.verify_mode = ssl.CERT_REQUIRED
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    called = client.wrap_bio(to_client, to_server, server_hostname=name)
    calling = server.wrap_bio(to_server, to_client, server_side=True)
    for half in (called, calling, called, calling):
        with suppress(ssl.SSLWantReadError):
            half.do_handshake()
    return cast(dict[str, Any], called.getpeercert())


# OpenSSL's codes of X509_verify_cert_error_string.
_NOT_YET_VALID, _EXPIRED, _PURPOSE = 9, 10, 26
_OTHER_NAME = (62, 63, 64)


def certificate_fault(error: ssl.SSLCertVerificationError, wanted: str = "") -> str:
    """Return what is wrong with a certificate, as the end of a sentence.

    Args:
        wanted: whose certificate it should be, and what to do if it is another's.
    """
    if error.verify_code == _EXPIRED:
        return "has expired; issue it again"
    if error.verify_code == _NOT_YET_VALID:
        return "is not valid yet; are the clocks of both hosts right?"
    if error.verify_code in _OTHER_NAME:
        return f"is not that of {wanted}"
    if error.verify_code == _PURPOSE:
        return "is not for servers and clients (extended key usage); issue it again for both"
    return f"is of another CA than security.tls_ca ({error.verify_message}); both sides need the same"


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return []  # files may be readable in a folder that cannot be listed


def _is_key_of_ca(security: SecuritySection, path: Path) -> bool:
    try:
        if path.stat().st_size > _KEY_BYTES or b"PRIVATE KEY" not in path.read_bytes():
            return False
    except OSError:
        return False  # a key that this process cannot read is no risk
    for certificate in _PEM_CERTIFICATE.findall(Path(str(security.tls_ca)).read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".pem") as alone:
            alone.write(certificate)
            alone.flush()
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(alone.name, str(path), password=lambda: b"")
            except ssl.SSLError:
                continue
            return True
    return False


def name_to_check(security: SecuritySection, address: str, role: str) -> str | None:
    """Return the name by which TLS must check the server at `address`; None: only its host's name."""
    return server_name(split_address(address)[0], role) if security.roles and security.server_roles else None


class Watch:
    """Detects that a set has changed on disk, checking at most once a second."""

    def __init__(self, security: SecuritySection):
        self._security = security
        self._checked_at = time.monotonic()
        self._stamp = self._read_stamp()
        self._warned: str | None = None

    def changed(self) -> Certificates | None:
        """Return the new set if there is one and it is complete."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return None
        self._checked_at = now
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return None
        try:
            found = read_certificates(self._security)
        except ConfigError as error:
            if str(error) != self._warned:
                log.warning("new certificates cannot be used yet: %s", error)
                self._warned = str(error)
            return None
        self._stamp, self._warned = stamp, None
        log.info("new certificates: %s", self._security.tls_certificate)
        return found

    def _read_stamp(self) -> tuple[object, ...]:
        return tuple(_file_stamp(getattr(self._security, name)) for name in _FILES)


def _file_stamp(path: Any) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def server_credentials(security: SecuritySection) -> grpc.ServerCredentials:
    """Return mutual TLS for a server; each new connection uses the current set on disk.

    Raises:
        ConfigError: a file cannot be used.
    """
    watch = Watch(security)

    def configuration(found: Certificates | None) -> Any:
        if found is None:
            return None  # keep the previous set
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], root_certificates=found.ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(read_certificates(security)),
        lambda: configuration(watch.changed()),
        require_client_authentication=True,
    )


def channel_credentials(security: SecuritySection) -> grpc.ChannelCredentials:
    """Return mutual TLS for a channel, with the current set on disk. Raises ConfigError."""
    found = read_certificates(security)
    return grpc.ssl_channel_credentials(found.ca, private_key=found.key, certificate_chain=found.certificate)


class RotatingChannel(Generic[ChannelT]):
    """A channel, asyncio or blocking, that is replaced for new calls when its certificates have changed on disk.

    Running calls stay on their channel; it is released at the second change after they began.
    """

    def __init__(self, security: SecuritySection, make: Callable[[], ChannelT]):
        self._watch = Watch(security)
        self._make = make
        self._current: Any = make()
        self._before: Any = None

    def current(self) -> Any:
        """Return the channel with the current certificates on disk."""
        if self._watch.changed() is not None:
            self._before, self._current = self._current, self._make()
        return self._current

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also looked up before __init__ has run
            raise AttributeError(name)
        return getattr(self._current, name)

    def _rotating(self, kind: str, *arguments: Any, **keywords: Any) -> "_Method":
        return _Method(self, lambda channel: getattr(channel, kind)(*arguments, **keywords))

    unary_unary = partialmethod(_rotating, "unary_unary")
    unary_stream = partialmethod(_rotating, "unary_stream")
    stream_unary = partialmethod(_rotating, "stream_unary")
    stream_stream = partialmethod(_rotating, "stream_stream")

    async def __aenter__(self) -> "RotatingChannel[ChannelT]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> "RotatingChannel[ChannelT]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *arguments: Any, **keywords: Any) -> Any:
        """Close the channel; an asyncio one returns an awaitable."""
        return self._current.close(*arguments, **keywords)


class _Method:
    """A method of whatever channel is current when it is called."""

    def __init__(self, rotating: RotatingChannel[Any], make: Callable[[Any], Any]):
        self._rotating = rotating
        self._make = make
        self._channel: Any = None
        self._method: Any = None

    def _current(self) -> Any:
        channel = self._rotating.current()
        if channel is not self._channel:
            self._channel, self._method = channel, self._make(channel)
        return self._method

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._current()(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._current(), name)
