"""Converts protobuf messages to the client's frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

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
    """Base of dataclasses that are made from a protobuf message, or from a message field, of the same name."""

    __slots__ = ()
    _by_name: ClassVar[dict[str, type["FromProto"]]] = {}

    def __init_subclass__(cls) -> None:
        FromProto._by_name[cls.__name__] = cls

    @classmethod
    def from_proto(cls, message: Message, **given: Any) -> Self:
        """Convert the message's fields that have the same names here; `given` has the others.

        Enum values become lower-case names, timestamps datetimes, durations seconds. An unset field has its default.
        """
        theirs = message.DESCRIPTOR.fields_by_name
        read = {}
        for own in fields(cls):  # type: ignore[arg-type]
            described = theirs.get(own.name)
            if described is None or own.name in given:
                continue
            may_lack = (own.default, own.default_factory) != (MISSING, MISSING)
            if not (may_lack and described.has_presence and not message.HasField(own.name)):
                read[own.name] = _plain(described, getattr(message, own.name))  # type: ignore[arg-type]  # upb's class
        return cls(**read, **given)

    @staticmethod
    def any_from_proto(message: Message) -> "FromProto | None":
        """Convert a message to the dataclass of its name; None if there is no such dataclass."""
        kind = FromProto._by_name.get(message.DESCRIPTOR.name)
        return kind.from_proto(message) if kind else None


def _plain(described: FieldDescriptor, value: Any) -> Any:
    if described.is_repeated:
        return dict(value) if isinstance(value, Mapping) else tuple(map(_plain_one, value))
    return _enum_name(described.enum_type, value) if described.enum_type is not None else _plain_one(value)


def _plain_one(value: Any) -> Any:
    match value:
        case Timestamp():
            return to_datetime(value)
        case Duration():
            return to_seconds(value)
        case Message():
            return FromProto.any_from_proto(value) or value
    return value
