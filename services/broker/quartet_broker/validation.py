"""Checks of requests: each raises INVALID_ARGUMENT naming the field, what came and what is allowed.

Where certificates have roles (docs/security.md), what members and events say is also checked against the caller's
certificate. The scripts check who owns what, by the name that `owner` returns.
"""

import asyncio
import math
import re
from collections.abc import Iterable, Sized
from contextlib import suppress
from ipaddress import ip_address

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct
from quartet.v1 import broker_pb2, common_pb2, experience_pb2, reward_pb2

from quartet_common import sampling as sampling_parameters
from quartet_common import tracing
from quartet_common.chats import ROLES
from quartet_common.config import split_address
from quartet_common.durations import to_seconds
from quartet_common.errors import ContractError, invalid_argument, permission_denied
from quartet_common.identity import Caller, restricted
from quartet_common.values import NAME, NAME_ALLOWED, struct_content

_MAX_WAIT_SECONDS = 30.0
# A response that is sent this long before the caller's deadline arrives in time.
_MARGIN_SECONDS = 0.25
# Numbers go through Lua, whose integers are exact up to here.
MAX_INTEGER = 2**53
# More steps, and so policy versions, than a run can have.
MAX_VERSION = 2**31 - 1
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
PURPOSES = frozenset(experience_pb2.Purpose.values())

MOST_BYTES: dict[type[Message], int] = {
    broker_pb2.RunSpec: 256 << 10,
    experience_pb2.PromptInstance: 16 << 20,
    broker_pb2.Member: 4 << 10,
    broker_pb2.RunEvent: 256 << 10,
    experience_pb2.GroupHeader: 1 << 10,
}
"""Maximum bytes of each message type that is stored: it bounds the responses that contain such messages."""
REQUEST_BYTES = dict.fromkeys(("CreateRun", "RegisterMember", "Heartbeat", "ReportProgress"), 1 << 20) | {
    "SubmitPrompts": MOST_BYTES[experience_pb2.PromptInstance] + (64 << 10),
}
"""Maximum bytes of a request, by method; more than MOST_BYTES, for the unknown fields of newer clients."""
MOST_IDS = 65_536
"""Ids in a request: as many as a batch can have groups."""
MOST_CONSUMED_IDS = 4 * MOST_IDS
"""Ids that a trainer without a ledger may name in OpenSession: those of several steps."""
MOST_EVALUATION_PROMPTS = 16_384
"""Prompts of an evaluation set: GetEvaluation answers with a GroupHeader of each."""
_STRUCT_DEPTH = 16  # parsers allow 100 nested messages, of which a level takes three
_REASON_BYTES = 2000


def name(field: str, value: str) -> str:
    """Check the name of a run or an evaluation set."""
    if not NAME.fullmatch(value):
        raise invalid_argument(field, came=repr(value), allowed=NAME_ALLOWED)
    return value


def identifier(field: str, value: str, most: int = 256) -> str:
    """Check an id that a caller chose: its length, and that it is one line of text."""
    if not 1 <= len(value.encode()) <= most:
        raise invalid_argument(field, came=f"{len(value.encode())} bytes", allowed=f"1 to {most} bytes")
    if _CONTROL.search(value):
        raise invalid_argument(field, came=repr(value[:100]), allowed="no control characters")
    return value


def integer(field: str, value: int, least: int, most: int = MAX_INTEGER) -> int:
    """Check a whole number."""
    if not least <= value <= most:
        allowed = f">= {least}" if most == MAX_INTEGER else f"{least} to {most}"
        raise invalid_argument(field, came=value, allowed=allowed)
    return value


def version(field: str, value: int, least: int = 0) -> int:
    """Check a step or a policy version."""
    return integer(field, value, least, MAX_VERSION)


def finite(field: str, value: float, least: float = -math.inf) -> float:
    """Check a real number."""
    if not (math.isfinite(value) and value >= least):
        raise invalid_argument(field, came=value, allowed="a finite number" + ("" if least < 0 else f" >= {least:g}"))
    return value


def count(field: str, values: Sized, most: int, least: int = 1) -> None:
    """Check the length of a repeated field: `least` to `most`."""
    if not least <= len(values) <= most:
        items = f"{len(values)} item{'' if len(values) == 1 else 's'}"
        raise invalid_argument(field, came=items, allowed=f"{least} to {most} items")


def stored(field: str, value: Message, most: int | None = None) -> bytes:
    """Serialize a message to be stored, and check its size: at most `most` bytes, by default MOST_BYTES."""
    return bounded(field, value.SerializeToString(), most or MOST_BYTES[type(value)])


def bounded(field: str, data: bytes, most: int) -> bytes:
    """Check the size of a serialized message; return the message."""
    if len(data) > most:
        raise invalid_argument(field, came=f"{len(data)} bytes", allowed=f"at most {most} bytes")
    return data


def _parameters(field: str, value: Struct) -> None:
    """Check how deep structs and lists are nested, and the numbers in them."""
    _depth(field, value, 1)
    struct_content(value, field, invalid_argument)


def _depth(field: str, value: Struct | ListValue, depth: int) -> None:
    if depth > _STRUCT_DEPTH:
        raise invalid_argument(field, "deeper nesting", f"structs and lists in {_STRUCT_DEPTH} levels")
    for each in value.fields.values() if isinstance(value, Struct) else value.values:
        kind = each.WhichOneof("kind")
        if kind in ("struct_value", "list_value"):
            _depth(field, getattr(each, kind), depth + 1)


def reason(text: str) -> str:
    """Return a reason to be stored, truncated to about a screen of text."""
    return text.encode()[:_REASON_BYTES].decode(errors="ignore")


def in_seconds(field: str, value: Duration) -> float:
    """Return a Duration in seconds. Check its nanoseconds: one with others cannot be printed as JSON."""
    if not 0 <= value.nanos < 10**9:
        raise invalid_argument(f"{field}.nanos", came=value.nanos, allowed="0 to 999,999,999")
    return to_seconds(value)


def deadline(field: str, wait: Duration, context: grpc.aio.ServicerContext) -> float:
    """Return the event loop time until which a call may wait: `wait` from now, but within the caller's deadline."""
    seconds = in_seconds(field, wait)
    if not 0 <= seconds <= _MAX_WAIT_SECONDS:
        raise invalid_argument(field, came=f"{seconds:g} s", allowed="0 to 30 s")
    remaining = context.time_remaining()
    if remaining is not None:
        seconds = min(seconds, max(0.0, remaining - _MARGIN_SECONDS))
    return asyncio.get_running_loop().time() + seconds


def instance(field: str, value: experience_pb2.PromptInstance, evaluation_set: str) -> None:
    """Check a prompt instance that a caller submits."""
    identifier(f"{field}.instance_id", value.instance_id)
    evaluates = value.purpose == experience_pb2.PURPOSE_EVALUATE
    if value.purpose not in PURPOSES or value.purpose == experience_pb2.PURPOSE_UNSPECIFIED:
        raise invalid_argument(f"{field}.purpose", came=value.purpose, allowed="TRAIN, EVALUATE or SERVE")
    if evaluates != bool(evaluation_set):
        raise invalid_argument(
            "evaluation_set",
            came=f"{evaluation_set!r} with {field}.purpose {experience_pb2.Purpose.Name(value.purpose)}",
            allowed="a set for PURPOSE_EVALUATE, empty otherwise",
        )
    if value.evaluation_id:
        raise invalid_argument(f"{field}.evaluation_id", came=repr(value.evaluation_id), allowed="empty: the broker's")
    if value.HasField("pinned_version"):
        version(f"{field}.pinned_version", value.pinned_version, -1)
        if value.pinned_version >= 0 and value.purpose != experience_pb2.PURPOSE_SERVE:
            raise invalid_argument(
                f"{field}.pinned_version", came=value.pinned_version, allowed="unset or -1, unless PURPOSE_SERVE"
            )
    integer(f"{field}.data_pass", value.data_pass, 0)
    if value.source:
        identifier(f"{field}.source", value.source, most=64)
    if value.traceparent and not tracing.is_valid(value.traceparent):
        raise invalid_argument(
            f"{field}.traceparent", came=repr(value.traceparent[:100]), allowed="empty, or a W3C trace context 00-…"
        )
    prompt(f"{field}.prompt", value.prompt)
    own = value.prompt.sampling
    if value.purpose == experience_pb2.PURPOSE_TRAIN and own.HasField("temperature") and not own.temperature:
        raise invalid_argument(
            f"{field}.prompt.sampling.temperature", came=0, allowed="> 0 for PURPOSE_TRAIN, or unset"
        )
    if value.purpose == experience_pb2.PURPOSE_TRAIN and (wrong := sampling_parameters.unreplayable(own)):
        name, came = wrong
        raise invalid_argument(f"{field}.prompt.sampling.{name}", came=came, allowed="unset for PURPOSE_TRAIN")


def prompt(field: str, value: experience_pb2.Prompt) -> None:
    """Check a prompt."""
    if len(value.prompt_id.encode()) > 256:
        raise invalid_argument(f"{field}.prompt_id", f"{len(value.prompt_id.encode())} bytes", "at most 256 bytes")
    match value.WhichOneof("input"):
        case None:
            raise invalid_argument(f"{field}.input", came="none", allowed="one of chat, text, token_ids, task")
        case "chat":
            if not value.chat.messages:
                raise invalid_argument(f"{field}.chat.messages", came="none", allowed="at least one")
            for n, message in enumerate(value.chat.messages):
                if message.role not in ROLES:
                    raise invalid_argument(
                        f"{field}.chat.messages[{n}].role", came=repr(message.role), allowed=", ".join(ROLES)
                    )
    sampling(f"{field}.sampling", value.sampling)
    environment(f"{field}.environment", value.environment)
    verifiers(f"{field}.verifiers", value.verifiers)


def verifiers(field: str, values: Iterable[reward_pb2.VerifierSpec]) -> None:
    """Check names, weights and parameters of verifiers. Only the reward service can check that they exist."""
    for n, value in enumerate(values):
        identifier(f"{field}[{n}].name", value.name)
        finite(f"{field}[{n}].weight", value.weight)
        _parameters(f"{field}[{n}].parameters", value.parameters)


def environment(field: str, value: experience_pb2.EnvironmentSpec) -> None:
    """Check an environment's bounds; zero and unset mean the default. Rollouts check its name and parameters."""
    _parameters(f"{field}.parameters", value.parameters)
    integer(f"{field}.max_turns", value.max_turns, 0, 1024)
    integer(f"{field}.max_turn_tokens", value.max_turn_tokens, 0)
    if value.max_answer_tokens:
        integer(f"{field}.max_answer_tokens", value.max_answer_tokens, 16)
    seconds = in_seconds(f"{field}.answer_deadline", value.answer_deadline)
    if value.HasField("answer_deadline") and not 0 < seconds <= 86400:
        raise invalid_argument(f"{field}.answer_deadline", f"{seconds:g} s", "above 0 s, at most one day")
    if value.scored_text not in experience_pb2.ScoredText.values():
        raise invalid_argument(
            f"{field}.scored_text", value.scored_text, ", ".join(experience_pb2.ScoredText.keys()[1:])
        )


def temperature_schedule(field: str, value: experience_pb2.TemperatureSchedule) -> None:
    """Check a temperature schedule."""
    if value.curve not in experience_pb2.TemperatureCurve.values():
        raise invalid_argument(f"{field}.curve", value.curve, ", ".join(experience_pb2.TemperatureCurve.keys()[1:]))
    if not value.points:
        raise invalid_argument(f"{field}.points", "none", "at least one")
    least = 0
    for n, point in enumerate(value.points):
        integer(f"{field}.points[{n}].policy_version", point.policy_version, least)
        least = point.policy_version + 1
        if not 0 < point.temperature < float("inf"):
            raise invalid_argument(f"{field}.points[{n}].temperature", point.temperature, "> 0")


def curriculum(field: str, value: broker_pb2.Curriculum) -> None:
    """Check a curriculum whose unset fields have their defaults."""
    if value.by not in broker_pb2.CurriculumUnit.values():
        raise invalid_argument(f"{field}.by", value.by, ", ".join(broker_pb2.CurriculumUnit.keys()[1:]))
    integer(f"{field}.window", value.window, 1, 64)
    bounds = {"solved_above": 1.0, "hopeless_below": value.solved_above, "floor": math.nextafter(1.0, 0.0)}
    for key, most in bounds.items():
        if not 0.0 <= getattr(value, key) <= most:
            allowed = {"hopeless_below": "0 to solved_above", "floor": "0 to 1, without 1"}.get(key, "0 to 1")
            raise invalid_argument(f"{field}.{key}", getattr(value, key), allowed)


def sampling(field: str, value: experience_pb2.SamplingParams) -> None:
    """Check sampling parameters; unset means the default."""
    if (refused := sampling_parameters.check(value)) is not None:
        name, came, allowed = refused
        raise invalid_argument(f"{field}.{name}", came=came, allowed=allowed)


_HOST_NAME = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,252}")
_KINDS = {common_pb2.SERVICE_KIND_ROLLOUT: "rollout", common_pb2.SERVICE_KIND_TRAINER: "trainer"}
OF_THE_TRAINING = frozenset({"step", "evaluation", "weights", "checkpoint", "sample"})
"""Events that the trainer of the run reports."""


def owner() -> str:
    """Return the name by which scripts identify the caller; "" for one that is not restricted."""
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
    """Check that the caller may report an event of this kind from this source. Raises PERMISSION_DENIED."""
    found = restricted()
    if found is None:
        return
    if kind == "member" or (kind in OF_THE_TRAINING and "trainer" not in found.roles):
        raise _not_for(found, f"event.{kind}", "the broker" if kind == "member" else "trainer")
    if source == "broker":
        raise permission_denied("event.notice.source", "got 'broker'; allowed: the caller's own instance id")


def _not_for(found: Caller, field: str, allowed: str) -> ContractError:
    return permission_denied(field, f"the caller's certificate has the role {found.shown_roles}; allowed: {allowed}")
