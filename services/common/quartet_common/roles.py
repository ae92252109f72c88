"""Who may call what, where calls come with certificates.

A certificate says its holder's role in a URI among its subject alternative names: `urn:quartet:role:trainer`. It may
say several. `quartet certs` writes them; a certificate without one may call nothing but health and handshake.

The table below is the whole rule: whatever it does not name is an operator's alone, so a new RPC is closed until
someone says whose it is (a test asks for every RPC of the contract).
"""

from collections.abc import Iterable

ROLE_URI = "urn:quartet:role:"

ROLES = ("broker", "reward", "rollout", "trainer", "client", "operator")
"""`operator` may call everything, `client` is for people and programs that bring prompts and read results."""

# To prove that one is there is no secret; whoever can connect at all may do it.
_OPEN_SERVICES = ("grpc.health.v1.Health", "quartet.v1.HandshakeService")
_REFLECTION = "grpc.reflection."

_EVERYONE = frozenset(ROLES)
_TRAINER = frozenset({"trainer"})
_ROLLOUT = frozenset({"rollout"})
_CLIENT = frozenset({"client"})
_MEMBERS = _ROLLOUT | _TRAINER
_READERS = _CLIENT | _MEMBERS

_ALLOWED: dict[str, dict[str, frozenset[str]]] = {
    "quartet.v1.BrokerService": {
        # The life of a run
        "CreateRun": _CLIENT | _TRAINER,
        "GetRun": _READERS,
        "ListRuns": _READERS,
        "FinishRun": _CLIENT | _TRAINER,
        "DeleteRun": _CLIENT,
        "WatchRun": _READERS,
        "AuditRun": _CLIENT,
        # Prompts and results
        "SubmitPrompts": _CLIENT,
        "EndPrompts": _CLIENT,
        "StartEvaluation": _CLIENT | _TRAINER,
        "GetEvaluation": _READERS,
        "CollectResults": _CLIENT | _TRAINER,
        "ListDead": _CLIENT | _TRAINER,
        "RequeueDead": _CLIENT,
        "GetGroup": _CLIENT | _TRAINER,
        # Generation
        "LeasePrompts": _ROLLOUT,
        "RenewLeases": _ROLLOUT,
        "ReleaseLeases": _ROLLOUT,
        "PutExperience": _ROLLOUT,
        # Training
        "OpenSession": _TRAINER,
        "LeaseExperience": _TRAINER,
        "DropExperience": _TRAINER,
        "MarkTrained": _TRAINER,
        "Commit": _TRAINER,
        "ReportProgress": _MEMBERS,
        # Membership
        "RegisterMember": _MEMBERS,
        "Heartbeat": _MEMBERS,
        "LeaveMember": _MEMBERS,
        "WatchMembers": _READERS,
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
