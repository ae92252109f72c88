"""Who may call what, where calls come with certificates, and by which name a caller checks a server's role.

A certificate says its holder's role in a URI among its subject alternative names: `urn:quartet:role:trainer`. It may
say several. `quartet certs` writes them; a certificate without one may call nothing but health and handshake.

TLS checks a server by a DNS name. So that it checks host and role at once, a server's certificate has a name made of
both, `gpu7.example.rollout.quartet.internal`, and that is the name a caller of a rollout at gpu7.example asks for.

The table below is the whole rule: whatever it does not name is an operator's alone, so a new RPC is closed until
someone says whose it is (a test asks for every RPC of the contract).

The interceptor sets the caller of each call; what answers it reads it here. There is none without TLS, with
`security.roles = false`, and in what a service does of itself: then nothing is checked.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

import grpc

from quartet_common.errors import ContractError, permission_denied

ROLE_URI = "urn:quartet:role:"
SERVER_DOMAIN = "quartet.internal"

ROLES = ("broker", "reward", "rollout", "trainer", "client", "operator")
"""`operator` may call everything, `client` is for people and programs that bring prompts and read results."""

SERVERS = ("broker", "reward", "rollout", "trainer")
"""The roles of those who answer calls."""

# To prove that one is there is no secret; whoever can connect at all may do it.
_OPEN_SERVICES = ("grpc.health.v1.Health", "quartet.v1.HandshakeService")
_REFLECTION = "grpc.reflection."

_EVERYONE = frozenset(ROLES)
_TRAINER = frozenset({"trainer"})
_ROLLOUT = frozenset({"rollout"})
_CLIENT = frozenset({"client"})
_MEMBERS = _ROLLOUT | _TRAINER
_READERS = _CLIENT | _MEMBERS
_TRAINER_AND_CLIENT = _TRAINER | _CLIENT

_ALLOWED: dict[str, dict[str, frozenset[str]]] = {
    "quartet.v1.BrokerService": {
        # The life of a run
        "CreateRun": _CLIENT,
        "GetRun": _READERS,
        "ListRuns": _READERS,
        "FinishRun": _TRAINER_AND_CLIENT,
        "DeleteRun": _CLIENT,
        "WatchRun": _CLIENT,
        "AuditRun": _CLIENT,
        # Prompts and results
        "SubmitPrompts": _CLIENT,
        "EndPrompts": _CLIENT,
        "StartEvaluation": _TRAINER_AND_CLIENT,
        "GetEvaluation": _TRAINER_AND_CLIENT,
        "CollectResults": _CLIENT,
        "ListDead": _TRAINER_AND_CLIENT,
        "RequeueDead": _CLIENT,
        "GetGroup": _TRAINER_AND_CLIENT,
        # Generation
        "LeasePrompts": _ROLLOUT,
        "RenewLeases": _ROLLOUT,
        "ReleaseLeases": _ROLLOUT,
        "GetUnscored": _ROLLOUT | _CLIENT,
        "PutExperience": _ROLLOUT,
        # Training
        "OpenSession": _TRAINER,
        "SettleTrained": _TRAINER,
        "LeaseExperience": _TRAINER,
        "DropExperience": _TRAINER,
        "MarkTrained": _TRAINER,
        "Commit": _TRAINER,
        "ReportProgress": _MEMBERS,
        # Membership
        "RegisterMember": _MEMBERS,
        "Heartbeat": _MEMBERS,
        "LeaveMember": _MEMBERS,
        "WatchMembers": _TRAINER_AND_CLIENT,
    },
    "quartet.v1.RewardService": {
        "Score": _ROLLOUT | _CLIENT,
        "ScoreStream": _ROLLOUT | _CLIENT,
        "ListVerifiers": _READERS,
        "Execute": _ROLLOUT | _CLIENT,
    },
    "quartet.v1.RolloutService": {
        "GetStatus": _READERS,
        "JoinWeightGroup": _TRAINER,
        "BeginWeightUpdate": _TRAINER,
        "FinishWeightUpdate": _TRAINER,
        "AbortWeightUpdate": _TRAINER,
        "SetSleep": _TRAINER,
        "Generate": _CLIENT,
        "GenerateStream": _CLIENT,
    },
    "quartet.v1.TrainerService": {
        "GetStatus": _READERS,
        "WatchMetrics": _CLIENT,
        "SaveCheckpoint": _CLIENT,
        "ListCheckpoints": _CLIENT,
        "Stop": _CLIENT,
        "Pause": _CLIENT,
        "Resume": _CLIENT,
    },
}


def roles_of(names: Iterable[bytes | str]) -> frozenset[str]:
    """Return the roles among a certificate's subject alternative names. Those that do not exist are left out."""
    texts = (name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)
    claimed = {text.removeprefix(ROLE_URI) for text in texts if text.startswith(ROLE_URI)}
    return frozenset(claimed & _EVERYONE)


def server_name(host: str, role: str) -> str:
    """Return the DNS name by which TLS checks that a server is `host` and has `role`."""
    with suppress(ValueError):  # then it is a name
        host = ipaddress.ip_address(host).exploded.replace(":", "-")
    return f"{host}.{role}.{SERVER_DOMAIN}"


def allowed_roles(method: str) -> frozenset[str]:
    """Return the roles that may call a method, given as "/quartet.v1.RewardService/Score"; all when it is open."""
    service, _, name = method.removeprefix("/").partition("/")
    if service in _OPEN_SERVICES:
        return _EVERYONE
    if service.startswith(_REFLECTION):
        return _EVERYONE
    return _ALLOWED.get(service, {}).get(name, frozenset()) | {"operator"}


def is_open(method: str) -> bool:
    """Return whether a method asks for no role at all."""
    return method.removeprefix("/").partition("/")[0] in _OPEN_SERVICES


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
