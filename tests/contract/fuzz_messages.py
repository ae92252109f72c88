"""Bad messages of any type, made from its descriptor alone: a new field or RPC is fuzzed without a word here.

Each field is most often something the service knows (`Hints`, by field name), so that what is wrong with one field is
found behind others that are right; else it is plausible, or at one of the ends of its type.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Hints: TypeAlias = Mapping[str, Sequence[object]]
"""What fields may hold that the service knows of, by the field's name."""

_INT32 = (0, 1, 2, -1, 7, 1024, 1025, 2**31 - 1, -(2**31))
_INT64 = (*_INT32, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, 1.0, 0.5, -1.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
_FLOATS32 = (*_FLOATS[:8], 3e38, 1e-45)
_STRINGS = (
    *("", "a", "x" * 256, "x" * 257, "é" * 129, "x" * 5000, " ", "a b"),
    *("\x00", "a\nb", "\x1b[31m", "\u202eabc", "\U0001f600"),
    *("*", "{a}", "a}:run", "q:{fuzz}:run", "a/../b", "%s%d", "'; --", "a|b|c", "a:b"),
    *("-", "1-", "0-1", "a@b", "None", "-1"),
)
_BYTES = (b"", b"\x00", b"abc", b"\xff" * 9, b"\x0a\x80\x80\x80\x80\x7f", b"\x08" * 100, bytes(70_000))
_ENDS = {
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: _INT64,
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS32,
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 5, 9, 99, -1, 2**31 - 1),
}
_DEEPEST = 5
# Of sixteen: from here on a field is left out, and from here on it is at an end of its type.
_LEFT_OUT, _AT_AN_END = 9, 12


def wire(chance: Random, kind: Descriptor, hints: Hints) -> bytes:
    """Return bytes for a request of a type: most often a message of it; else broken, cut short, or anything."""
    how = chance.randrange(16)
    if how == 15:
        return chance.randbytes(chance.randrange(101))
    message = GetMessageClass(kind)()
    _fill(chance, message, hints, 0)
    data = message.SerializeToString()
    if how == 14:
        return data[: chance.randrange(len(data) + 1)]
    if how == 13 and data:
        at = chance.randrange(len(data))
        return data[:at] + chance.randbytes(chance.randrange(1, 3)) + data[at + 1 :]
    return data + (b"\x82\x7d\x04\x0a\x02hi" if how == 12 else b"")  # a field that no proto has


def _fill(chance: Random, message: Message, hints: Hints, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        how = chance.randrange(16)
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and chance.randrange(len(oneof.fields) + 1):
            continue  # most often one of its fields is set; sometimes none, or several, of which the last counts
        known = _known(field, hints)
        if _LEFT_OUT <= how < _AT_AN_END and not known:
            continue
        if field.message_type is None and field.is_repeated:
            values = [_scalar(chance, field, known, how) for _ in range(chance.randrange(4))]
            getattr(message, field.name).extend(values[:1] * 400 if how == 15 else values)
        elif field.message_type is None:
            setattr(message, field.name, _scalar(chance, field, known, how))
        elif field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if value.message_type is None:
                getattr(message, field.name)[_scalar(chance, key, known, how)] = _scalar(chance, value, (), how)
        elif depth < _DEEPEST:
            place = getattr(message, field.name)
            part = place.add() if field.is_repeated else place
            if known:
                part.CopyFrom(chance.choice(known))
            else:
                part.SetInParent()
                _fill(chance, part, hints, depth + 1)
            if field.is_repeated:
                many = how == 15 and part.ByteSize() < 4096  # not many of many: the server's memory is measured
                place.extend([part] * (257 if many else chance.randrange(4)))


def _known(field: FieldDescriptor, hints: Hints) -> Sequence[object]:
    """Return the hints for a field: another field of that name may be a message, or none."""
    values = hints.get(field.name, ())
    kind = getattr(values[0], "DESCRIPTOR", None) if values else None
    return values if kind is field.message_type else ()


def _scalar(chance: Random, field: FieldDescriptor, known: Sequence, how: int) -> object:
    if how < _AT_AN_END and known:
        return chance.choice(known)
    if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        ends = _ENDS[field.cpp_type]
        return chance.choice(ends if how >= _AT_AN_END else ends[:3])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice(_BYTES) if how >= _AT_AN_END else chance.randbytes(chance.randrange(13))
    return chance.choice(_STRINGS) if how >= _AT_AN_END else _text(chance)


def _text(chance: Random) -> str:
    planes = ((0x20, 0x7F), (0, 0xD800), (0xE000, 0x110000))  # there are no lone surrogates in a message
    return "".join(chr(chance.randrange(*chance.choice(planes))) for _ in range(chance.randrange(13)))
