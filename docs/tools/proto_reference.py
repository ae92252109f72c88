"""docs/protos.md: every service, call, message, field and enum of the contract, with the .proto files' comments."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from escaping import escaped
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodOptions,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
FILES = ("broker", "rollout", "reward", "trainer", "experience", "tensor", "common")

HEAD = """\
# The contract, call by call

What stands in [protos/quartet/v1](../protos/quartet/v1): services and their calls, messages and their fields, enums.
The files themselves are meant to be read; this page is for looking up, and is made from them by `docs/tools/write.py`.

Stubs for Python are in the package `quartet-protos` (`from quartet.v1 import broker_pb2, broker_pb2_grpc`); other
languages make theirs from the files. Errors are gRPC statuses with `google.rpc` details; what they mean is in
[troubleshooting.md](troubleshooting.md), who may call what in [certificates.md](certificates.md#roles).
"""

_SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items() if number != 11
}
# Numbers of descriptor.proto's fields, as paths of comments have them.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELD, _NESTED, _NESTED_ENUM, _ONEOF, _VALUE, _METHOD = 2, 3, 4, 8, 2, 2


def read_files() -> list[FileDescriptorProto]:
    """Return the compiled protos of the contract with their comments."""
    include = Path(protoc.__file__).parent / "_proto"
    names = [f"quartet/v1/{name}.proto" for name in FILES]
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.binpb"
        arguments = ["protoc", f"-I{PROTOS}", f"-I{include}", f"-I{_googleapis()}", "--include_source_info"]
        if protoc.main([*arguments, f"--descriptor_set_out={image}", *names]):
            raise SystemExit("the protos cannot be compiled: see above")
        compiled = {file.name: file for file in FileDescriptorSet.FromString(image.read_bytes()).file}
    return [compiled[name] for name in names]


def _googleapis() -> Path:
    from google.rpc import status_pb2

    return Path(status_pb2.__file__).parents[2]


class CommentedFile:
    """A file and its comments."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in file.source_code_info.location
        }
        # The file's own comment stands before `syntax`.
        self.about = self._comments.get((12,), "")

    def paragraphs(self, *path: int) -> str:
        lines = [line.strip() for line in self._comments.get(path, "").strip().splitlines()]
        return escaped("\n".join(lines))

    def line(self, *path: int) -> str:
        return " ".join(self.paragraphs(*path).split()).replace("|", "\\|")


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    files = [CommentedFile(file) for file in read_files()]
    known = {name for one in files for name in _names(one.file)}
    for one in files:
        parts.append(f"## {one.file.name.rpartition('/')[2]}\n")
        if about := "\n".join(line.strip() for line in one.about.strip().splitlines()):
            parts.append(about + "\n")
        for index, service in enumerate(one.file.service):
            parts += _service(one, index, service, known)
        for index, message in enumerate(one.file.message_type):
            parts += _message(one, (_MESSAGES, index), message, "", known)
        for index, enum in enumerate(one.file.enum_type):
            parts += _enum(one, (_ENUMS, index), enum, "")
    return "\n".join(parts)


def _names(file: FileDescriptorProto) -> Iterator[str]:
    """Return the headings of messages and enums, nested ones as Outer.Inner."""

    def inside(message: DescriptorProto, prefix: str) -> Iterator[str]:
        yield prefix + message.name
        for enum in message.enum_type:
            yield f"{prefix}{message.name}.{enum.name}"
        for nested in message.nested_type:
            if not nested.options.map_entry:
                yield from inside(nested, f"{prefix}{message.name}.")

    yield from (enum.name for enum in file.enum_type)
    for message in file.message_type:
        yield from inside(message, "")


def _service(one: CommentedFile, index: int, service, known: set[str]) -> list[str]:
    parts = [f"### {service.name}\n", one.paragraphs(_SERVICES, index) + "\n"]
    for number, method in enumerate(service.method):
        request = ("stream " if method.client_streaming else "") + _linked(method.input_type, known)
        response = ("stream " if method.server_streaming else "") + _linked(method.output_type, known)
        repeat = {
            MethodOptions.NO_SIDE_EFFECTS: " · changes nothing",
            MethodOptions.IDEMPOTENT: " · may be repeated",
        }.get(method.options.idempotency_level, "")
        parts.append(f"#### {service.name}.{method.name}\n")
        parts.append(f"{request} → {response}{repeat}\n")
        parts.append(one.paragraphs(_SERVICES, index, _METHOD, number) + "\n")
    return parts


def _message(
    one: CommentedFile, path: tuple[int, ...], message: DescriptorProto, prefix: str, known: set[str]
) -> Iterator[str]:
    name = prefix + message.name
    yield f"### {name}\n"
    if comment := one.paragraphs(*path):
        yield comment + "\n"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if message.field:
        rows = ["| field | type | |", "|---|---|---|"]
        for index, field in enumerate(message.field):
            comment = one.line(*path, _FIELD, index)
            if field.HasField("oneof_index") and not field.proto3_optional:
                comment = f"One of `{message.oneof_decl[field.oneof_index].name}`. {comment}".strip()
            rows.append(f"| `{field.name}` = {field.number} | {_type(field, maps, known)} | {comment} |")
        yield "\n".join(rows) + "\n"
    for index, nested in enumerate(message.nested_type):
        if nested.name not in maps:
            yield from _message(one, (*path, _NESTED, index), nested, f"{name}.", known)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(one, (*path, _NESTED_ENUM, index), enum, f"{name}.")


def _enum(one: CommentedFile, path: tuple[int, ...], enum: EnumDescriptorProto, prefix: str) -> Iterator[str]:
    yield f"### {prefix}{enum.name}\n"
    if comment := one.paragraphs(*path):
        yield comment + "\n"
    rows = ["| value | |", "|---|---|"]
    for index, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` = {value.number} | {one.line(*path, _VALUE, index)} |")
    yield "\n".join(rows) + "\n"


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto], known: set[str]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return f"map of {_type(entry.field[0], {}, known)} to {_type(entry.field[1], {}, known)}"
    text = _linked(field.type_name, known) if field.type_name else _SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    return f"optional {text}" if field.proto3_optional else text


def _linked(type_name: str, known: set[str]) -> str:
    name = type_name.removeprefix(".quartet.v1.")
    if name in known:
        return f"[{name}](#{name.lower().replace('.', '')})"
    return f"`{type_name.removeprefix('.')}`"
