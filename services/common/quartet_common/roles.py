"""Who may call what, where calls come with certificates, and by which name a caller checks a server's role.

A certificate says its holder's role in a URI among its subject alternative names: `urn:quartet:role:trainer`. It may
say several. `quartet certs` writes them; a certificate without one may call nothing but health and handshake.

TLS checks a server by a DNS name. So that it checks host and role at once, a server's certificate has a name made of
both, `gpu7.example.rollout.quartet.internal`, and that is the name a caller of a rollout at gpu7.example asks for. The
CA says that its certificates have such names (`SERVER_ROLES_URI`): who trusts it asks for them.

The table below is the whole rule: whatever it does not name is an operator's alone, so a new RPC is closed until
someone says whose it is (a test asks for every RPC of the contract).
"""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

ROLE_URI = "urn:quartet:role:"
SERVER_ROLES_URI = "urn:quartet:server-roles"
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


def is_named(method: str) -> bool:
    """Return whether the table says whose the method is."""
    service, _, name = method.removeprefix("/").partition("/")
    return name in _ALLOWED.get(service, {})
