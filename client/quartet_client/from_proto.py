"""Converts protobuf messages to the client's frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, Self, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from quartet_common.durations import to_seconds


def enum_name(enum, value: int) -> str:
    """Return an enum value's name without its prefix, in lower case: RUN_STATE_ACTIVE becomes "active"."""
    return _enum_name(enum.DESCRIPTOR, value)


def _enum_name(descriptor, value: int) -> str:
    names = descriptor.values_by_number
    if value not in names:
        return str(value)  # of a newer server
    return names[value].name.removeprefix(names[0].name.removesuffix("UNSPECIFIED")).lower()


def to_datetime(timestamp: Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)


class FromProto:
    """Base of dataclasses that are made from a protobuf message. A field annotated with another of them, or a tuple of
    them, is made from the message or messages in the field of the same name."""

    __slots__ = ()

    @classmethod
    def from_proto(cls, message: Message, **given: Any) -> Self:
        """Convert the message's fields that have the same names here; `given` has the others.

        Enum values become lower-case names, timestamps datetimes, durations seconds. An unset field has its default.
        """
        theirs, nested = message.DESCRIPTOR.fields_by_name, _nested(cls)  # type: ignore[arg-type]  # mypy: Self is no Hashable
        read = {}
        for own in fields(cls):  # type: ignore[arg-type]
            described = theirs.get(own.name)
            if described is None or own.name in given:
                continue
            may_lack = (own.default, own.default_factory) != (MISSING, MISSING)
            if not (may_lack and described.has_presence and not message.HasField(own.name)):
                value = getattr(message, own.name)
                read[own.name] = _plain(described, value, nested.get(own.name))  # type: ignore[arg-type]  # upb's class
        return cls(**read, **given)


@cache
def _nested(cls: type[FromProto]) -> Mapping[str, type[FromProto]]:
    """Return the dataclasses of fields that are annotated with one: `Score`, `Score | None`, `tuple[Score, ...]`."""
    return {
        name: kind
        for name, hint in get_type_hints(cls).items()
        for kind in (hint, *get_args(hint))
        if isinstance(kind, type) and issubclass(kind, FromProto)
    }


def _plain(described: FieldDescriptor, value: Any, kind: type[FromProto] | None) -> Any:
    if described.is_repeated:
        return dict(value) if isinstance(value, Mapping) else tuple(_plain_one(one, kind) for one in value)
    return _enum_name(described.enum_type, value) if described.enum_type is not None else _plain_one(value, kind)


def _plain_one(value: Any, kind: type[FromProto] | None) -> Any:
    match value:
        case Timestamp():
            return to_datetime(value)
        case Duration():
            return to_seconds(value)
        case Message() if kind is not None:
            return kind.from_proto(value)
    return value
