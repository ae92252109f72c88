"""What callers may say about themselves, where calls come with certificates that have roles (docs/security.md).

What belongs to whom the scripts check, by the name that `owner` gives them. Here is what takes no look into Redis.
"""

import re
from contextlib import suppress
from ipaddress import ip_address

from quartet.v1 import broker_pb2, common_pb2

from quartet_common.config import split_address
from quartet_common.errors import ContractError, invalid_argument, permission_denied
from quartet_common.identity import Caller, restricted

_HOST_NAME = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,252}")
_KINDS = {common_pb2.SERVICE_KIND_ROLLOUT: "rollout", common_pb2.SERVICE_KIND_TRAINER: "trainer"}
OF_THE_TRAINING = frozenset({"step", "evaluation", "weights", "checkpoint", "sample"})
"""Events that the trainer of the run reports."""


def owner() -> str:
    """Return the name by which the scripts tell the caller from others; "" if it may do all."""
    found = restricted()
    return found.name if found is not None else ""


def check_member(member: broker_pb2.Member, any_address: bool) -> None:
    """Check address and kind of a member that registers; without `any_address`, that its certificate is for that host.

    Raises:
        ContractError: INVALID_ARGUMENT, PERMISSION_DENIED.
    """
    host = _host_of(member.address)
    found, role = restricted(), _KINDS[member.kind]
    if found is None:
        return
    if role not in found.roles:
        raise _not_for(found, "member.kind", role)
    if not (any_address or found.is_at(host, role)):
        raise permission_denied(
            "member.address",
            f"the caller's certificate '{found.name}' does not name the host {host}; allowed: a host that it names "
            "(any with broker.any_member_address)",
        )


def _host_of(address: str) -> str:
    """Return the host of "host:port", an IP address in its usual form."""
    with suppress(ValueError):
        host, port = split_address(address)
        if port and _HOST_NAME.fullmatch(host):
            return host
        if port:
            return str(ip_address(host))
    raise invalid_argument("member.address", repr(address), "host:port with a port from 1 to 65535, no scheme")


def check_event(kind: str, source: str) -> None:
    """Check who reports an event of a kind, and in whose name. Raises PERMISSION_DENIED."""
    found = restricted()
    if found is None:
        return
    if kind == "member" or (kind in OF_THE_TRAINING and "trainer" not in found.roles):
        raise _not_for(found, f"event.{kind}", "the broker" if kind == "member" else "trainer")
    if source == "broker":
        raise permission_denied("event.notice.source", "got 'broker'; allowed: the caller's own instance id")


def _not_for(found: Caller, field: str, allowed: str) -> ContractError:
    return permission_denied(field, f"the caller's certificate has the role {found.shown_roles}; allowed: {allowed}")
