"""Who makes the call that is being answered, where calls come with certificates that have roles.

The interceptor sets the caller of each call; what answers it reads it here. There is none without TLS, with
`security.roles = false`, and in what a service does of itself: then nothing is checked.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

import grpc

from quartet_common.errors import ContractError, permission_denied
from quartet_common.roles import SERVER_DOMAIN, roles_of, server_name

_LONGEST_NAME = 256
_IDENTIFIERS = "x509_common_name", "x509_subject_alternative_name"


@dataclass(frozen=True)
class Caller:
    """The holder of a certificate: its common name, or else its first alternative name that is no role; its roles.

    Attributes:
        names: all alternative names, hosts among them.
    """

    name: str
    roles: frozenset[str]
    names: frozenset[str]

    @property
    def shown_roles(self) -> str:
        """The roles, for people."""
        return ", ".join(sorted(self.roles))

    def is_at(self, host: str, role: str) -> bool:
        """Return whether TLS would accept this certificate as a server's at `host` with `role`."""
        for wanted in (host.lower(), server_name(host, role)):
            parent = wanted.partition(".")[2]
            if wanted in self.names or (parent and parent != SERVER_DOMAIN and f"*.{parent}" in self.names):
                return True
        return False


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def name_in(certificate: Mapping[str, Sequence[bytes]]) -> str:
    """Return the name of a certificate's holder, from gRPC's authentication context; "" if there is none."""
    common, alternative = (certificate.get(key, ()) for key in _IDENTIFIERS)
    for raw in (*common, *alternative):
        if not raw.startswith(b"urn:quartet:"):
            return raw.decode(errors="replace")[:_LONGEST_NAME]
    return ""


def of_certificate(certificate: Mapping[str, Sequence[bytes]]) -> Caller:
    """Return the caller that gRPC's authentication context is of."""
    return _of_names(name_in(certificate) or "unnamed", tuple(certificate.get(_IDENTIFIERS[1], ())))


@lru_cache(1024)
def _of_names(name: str, alternative: tuple[bytes, ...]) -> Caller:
    texts = [raw.decode(errors="replace") for raw in alternative]
    return Caller(name, roles_of(texts), frozenset(_normal(text) for text in texts))


def _normal(name: str) -> str:
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()


def begin(caller: Caller) -> None:
    """Say who makes the call that this task answers."""
    _caller.set(caller)


@contextmanager
def of_the_service() -> Iterator[None]:
    """What is done inside is done by the service of itself, whatever call it is part of."""
    token = _caller.set(None)
    try:
        yield
    finally:
        _caller.reset(token)


def caller() -> Caller | None:
    """Return who makes the call; None if nobody is to be told apart."""
    return _caller.get()


def restricted() -> Caller | None:
    """Return the caller if what it says about itself must be checked: not of an operator."""
    found = _caller.get()
    return None if found is None or "operator" in found.roles else found


def check_owner(what: str, owner: str) -> None:
    """Raise PERMISSION_DENIED if `what` belongs to the holder of another certificate; "" belongs to nobody."""
    found = restricted()
    if found is not None and owner and found.name != owner:
        raise not_the_owner(what, owner)


def not_the_owner(what: str, owner: str) -> ContractError:
    """Return the refusal of a caller whose certificate has another name than that of the owner of `what`."""
    name = found.name if (found := _caller.get()) is not None else ""
    return permission_denied(
        what, f"it belongs to the certificate '{owner}', the caller's is '{name}'; allowed: its owner, operators"
    )


def peer_of(context: grpc.aio.ServicerContext) -> str:
    """Return who calls: "certificate NAME", or "host ADDRESS"."""
    if name := name_in(context.auth_context()):
        return f"certificate {name}"
    # "ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711", "unix:..."
    address = context.peer()
    return f"host {address.rpartition(':')[0]}" if address.startswith("ip") else f"host {address}"
