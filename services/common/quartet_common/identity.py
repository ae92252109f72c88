"""Roles in certificates: which RPCs a caller may call, and how a caller checks a server's role.

A certificate has its holder's roles as URIs among its subject alternative names, e.g. `urn:quartet:role:trainer`.
`quartet certs` writes them; a certificate without a role may call only health and handshake.

TLS checks a server by a DNS name. To check host and role at once, a server's certificate has a name made of both, e.g.
`gpu7.example.rollout.quartet.internal`, and callers of a rollout at gpu7.example require this name.

RPCs that the table below does not list are allowed to operators only, so a new RPC is closed until it is added (a test
checks every RPC of the contract).

The interceptor sets the caller of each call, and its handlers read it here. There is none, and nothing is checked,
without TLS, with `security.roles = false`, and in a service's own background work.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

import grpc

from quartet_common.errors import ContractError, permission_denied

ROLE_URI = "urn:quartet:role:"
SERVER_DOMAIN = "quartet.internal"

ROLES = ("broker", "reward", "rollout", "environment", "trainer", "client", "operator")
"""`operator` may call everything; `client` is for people and programs that submit prompts and read results."""

SERVERS = ("broker", "reward", "rollout", "environment", "trainer")
"""The roles of servers."""

# Everyone who can connect may call these: that a service is alive is no secret.
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
        "CollectResults": _TRAINER_AND_CLIENT,
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
        "SetDrain": _CLIENT,
        "Generate": _CLIENT,
        "GenerateStream": _CLIENT,
        "LogProbs": _ROLLOUT | _CLIENT,
    },
    "quartet.v1.EnvironmentService": {
        "ListEnvironments": _READERS,
        "ListTasks": _CLIENT,
        "RunEpisode": _ROLLOUT,
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
    """Return the known roles among a certificate's subject alternative names."""
    texts = (name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)
    claimed = {text.removeprefix(ROLE_URI) for text in texts if text.startswith(ROLE_URI)}
    return frozenset(claimed & _EVERYONE)


def server_name(host: str, role: str) -> str:
    """Return the DNS name by which TLS checks that a server is `host` and has `role`."""
    with suppress(ValueError):  # a name, not an address
        host = ip_address(host).exploded.replace(":", "-")
    return f"{host}.{role}.{SERVER_DOMAIN}"


def allowed_roles(method: str) -> frozenset[str]:
    """Return the roles that may call a method, given as "/quartet.v1.RewardService/Score"; all when it is open."""
    service, _, name = method.removeprefix("/").partition("/")
    if is_open(method) or service.startswith(_REFLECTION):
        return _EVERYONE
    return _ALLOWED.get(service, {}).get(name, frozenset()) | {"operator"}


def is_open(method: str) -> bool:
    """Return whether a method may be called without a role."""
    return method.removeprefix("/").partition("/")[0] in _OPEN_SERVICES


_LONGEST_NAME = 256
_IDENTIFIERS = "x509_common_name", "x509_subject_alternative_name"


@dataclass(frozen=True)
class Caller:
    """The holder of a certificate.

    Attributes:
        name: the common name, or else the first alternative name that is no role.
        names: all alternative names, including hosts.
    """

    name: str
    roles: frozenset[str]
    names: frozenset[str]

    @property
    def shown_roles(self) -> str:
        """The roles as text."""
        return ", ".join(sorted(self.roles))

    def is_at(self, host: str, role: str) -> bool:
        """Return whether TLS would accept this certificate as a server's at `host` with `role`."""
        for wanted in (host.lower(), server_name(host, role)):
            parent = wanted.partition(".")[2]
            if wanted in self.names or (parent and parent != SERVER_DOMAIN and f"*.{parent}" in self.names):
                return True
        return False


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def name_in(certificate: Mapping[str, Iterable[bytes]]) -> str:
    """Return the name of a certificate's holder, from gRPC's authentication context; "" if there is none."""
    common, alternative = (certificate.get(key, ()) for key in _IDENTIFIERS)
    for raw in (*common, *alternative):
        if not raw.startswith(b"urn:quartet:"):
            return raw.decode(errors="replace")[:_LONGEST_NAME]
    return ""


def of_certificate(certificate: Mapping[str, Iterable[bytes]]) -> Caller:
    """Return the caller, from gRPC's authentication context."""
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
    """Set the caller of the call that this task answers."""
    _caller.set(caller)


@contextmanager
def of_the_service() -> Iterator[None]:
    """Act as the service itself inside the context, not as the caller of the current call."""
    token = _caller.set(None)
    try:
        yield
    finally:
        _caller.reset(token)


def caller() -> Caller | None:
    """Return the current caller; None if callers are not distinguished."""
    return _caller.get()


def restricted() -> Caller | None:
    """Return the current caller, unless it is an operator, to whom no restriction applies."""
    found = _caller.get()
    return None if found is None or "operator" in found.roles else found


def check_owner(what: str, owner: str) -> None:
    """Raise PERMISSION_DENIED if `what` has an owner, given by its certificate's name, and it is not the caller."""
    found = restricted()
    if found is not None and owner and found.name != owner:
        raise not_the_owner(what, owner)


def not_the_owner(what: str, owner: str) -> ContractError:
    """Return the error for a caller that is not the owner of `what`."""
    name = found.name if (found := _caller.get()) is not None else ""
    return permission_denied(
        what, f"it belongs to the certificate '{owner}', the caller's is '{name}'; allowed: its owner, operators"
    )


def peer_of(context: grpc.aio.ServicerContext) -> str:
    """Return the peer of a call: "certificate NAME" or "host ADDRESS"."""
    if name := name_in(context.auth_context()):
        return f"certificate {name}"
    # "ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711", "unix:..."
    address = context.peer()
    return f"host {address.rpartition(':')[0]}" if address.startswith("ip") else f"host {address}"
