"""Error sentences about sections of the run file: the key, what came, what is allowed, where."""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


class OtherName(NamedTuple):
    """A key of another project.

    Attributes:
        name: its name there, of some with its path.
        default: its default there, as text; empty for others than TRL's keys.
        key: the equivalent here, e.g. "run.group_size"; empty: there is none.
        note: how the equivalent differs, or why there is none.
    """

    project: str
    name: str
    default: str
    key: str
    note: str

    def sentence(self) -> str:
        """Return "TRL's num_generations is run.group_size here"."""
        here = f"is {self.key} here" if self.key else "is not here"
        return f"{self.project}'s {self.name} {here}{f': {self.note}' if self.note else ''}"


@cache
def other_names() -> tuple[OtherName, ...]:
    """Return the arguments of TRL's GRPOTrainer and GRPOConfig, and most used keys of others, from other_names.toml."""
    projects = tomllib.loads(files("quartet_common").joinpath("other_names.toml").read_text(encoding="utf-8"))
    return tuple(
        OtherName(project, name, *row)
        for project, tables in projects.items()
        for table in tables.values()
        for name, row in table.items()
    )


def meant(parts: Sequence[str]) -> str:
    """Return the end of a sentence about the unknown key `parts`, if it is another project's: its name here; else "".

    The last part suffices, in any section, unless it is the key's here too.
    """
    path = ".".join(parts)
    same = [each for each in other_names() if f".{path}".endswith(f".{each.name}")]
    same.sort(key=lambda each: len(each.name), reverse=True)
    last = parts[-1]
    named = [one for one in other_names() if one.name.rpartition(".")[2] == last != one.key.rpartition(".")[2]]
    return _ending(same or (named if last != "name" else []))


def keys_named(name: str) -> list[str]:
    """Return the keys here, whose last part is `name`, among the equivalents of other projects' keys."""
    keys = (key for one in other_names() for key in one.key.split(", "))
    return list(dict.fromkeys(key for key in keys if key.endswith(f".{name}")))


def nearly_meant(name: str) -> str:
    """Return what `meant` returns, for a misspelled name."""
    long = {each.name: each for each in other_names() if len(each.name) > 6}  # short names resemble too many words
    return _ending([long[close] for close in difflib.get_close_matches(name, long, n=1, cutoff=0.85)])


def _ending(found: Sequence[OtherName]) -> str:
    return f": {found[0].sentence()}" if found else ""


Where = Callable[[Sequence[str | int]], str]
"""Where a key, given as its parts, was set, e.g. "in run.toml"."""

_FEW = 8  # an error lists at most so many names; of more, the nearest
_NEAREST = 5
_RESEMBLES = 0.72  # least similarity of a name that may be meant
_SPELLING = 0.85  # least similarity of a misspelled name to the right one, by difflib's ratio


def sentences(
    model: type[BaseModel], error: ValidationError, name: str, where: Where, others: Mapping[str, type[BaseModel]]
) -> list[str]:
    """Return every problem of section `name`, e.g. "trainer", as a sentence without secrets.

    Args:
        model: the section's model, whose keys are suggested for an unknown one.
        error: pydantic's.
        others: further sections to which an unknown key may belong.
    """
    return [_sentence(model, problem, name, where, others) for problem in error.errors(include_url=False)]


def _sentence(
    model: type[BaseModel], problem: Mapping[str, Any], name: str, where: Where, others: Mapping[str, type[BaseModel]]
) -> str:
    parts = (name, *(str(part) for part in problem["loc"]))
    key = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        allowed = _keys_at(model, problem["loc"][:-1])
        elsewhere = [
            found for section, each in {name: model, **others}.items() for found in _places(each, parts[-1], section)
        ]
        return f"unknown key {key} {where(parts)}{_unknown(parts, allowed, elsewhere)}"
    if problem["type"] == "missing":
        return f"{key} is missing {where(parts[:-1])}: it has no default"
    message, given = problem["msg"].removeprefix("Value error, "), problem["input"]
    field, colon, rest = message.partition(": ")
    if isinstance(given, dict) and field in _keys_at(model, problem["loc"]):  # a validator of the section names its key
        key, message, given = f"{key}.{field}", rest, given.get(field, given)
        parts = (*parts, field)
    came = "" if isinstance(given, (dict, BaseModel)) else f"got {without_passwords(given)} "
    for theirs, ours in _TOML_WORDS.items():
        message = re.sub(theirs, ours, message)
    return f"{key}: {came}{where(parts)}: {message[0].lower()}{message[1:]}"


_TOML_WORDS = {"valid dictionary( or .*)?": "table, { NAME = … }", "valid (list|tuple)": "list, [ … ]"}


def unknown_section(name: str, value: Any, allowed: Sequence[str], where: Where) -> list[str]:
    """Return sentences about an unknown section: one for each key that another project has, else one for it."""
    misspelled = isinstance(value, dict) and difflib.get_close_matches(name, allowed, n=1, cutoff=_SPELLING)
    known = [(leaf, cure) for leaf in _leaves((name,), value) if (cure := meant(leaf))]
    if known and not misspelled:
        return [f"unknown key {'.'.join(leaf)} {where(leaf)}{cure}" for leaf, cure in known]
    return [_no_section(name, where, allowed)]


def _no_section(name: str, where: Where, allowed: Sequence[str]) -> str:
    return f"unknown section [{name}] {where((name,))}{did_you_mean(name, allowed)}"


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: a similar one, all that are allowed, or the nearest."""
    longer = [each for each in allowed if "_" in name and each.startswith(f"{name}_")]
    if close := longer or difflib.get_close_matches(name, allowed, n=1, cutoff=_RESEMBLES):
        return f": did you mean '{close[0]}'?"
    if len(allowed) > _FEW:
        nearest = difflib.get_close_matches(name, allowed, n=_NEAREST, cutoff=0.0)
        return f"; the nearest of {len(allowed)} allowed: {', '.join(nearest)}"
    return f"; allowed: {', '.join(sorted(allowed))}" if allowed else ""


def without_passwords(value: Any) -> str:
    """Return a value's repr, with the passwords of URLs masked."""
    return re.sub(
        r"(://[^:@/\s]*:)\S*@|(password=)[^&\s'\"]*", lambda m: f"{m[1]}***@" if m[1] else f"{m[2]}***", repr(value)
    )


def _unknown(parts: Sequence[str], allowed: Sequence[str], elsewhere: Sequence[str]) -> str:
    if theirs := meant(parts):
        return theirs
    if not difflib.get_close_matches(parts[-1], allowed, n=1, cutoff=_SPELLING):
        if places := parts[-1] != "name" and [*elsewhere, *keys_named(parts[-1])]:
            return f": did you mean {places[0]}?"
        if theirs := nearly_meant(parts[-1]):
            return theirs
    return did_you_mean(parts[-1], allowed)


def _leaves(parts: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*parts, key), inner)
    else:
        yield parts


def _places(model: type[BaseModel], name: str, prefix: str) -> Iterator[str]:
    """Yield the paths of keys with this name, nested ones too, under `prefix`."""
    for key, info in model.model_fields.items():
        if key == name:
            yield f"{prefix}.{key}"
            continue
        for nested in _nested_models(info):
            yield from _places(nested, name, f"{prefix}.{key}")


def _keys_at(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the keys allowed in the (sub)section at `loc`, following nested models; those of all, where one is
    chosen."""
    models = [model]
    for part in loc:
        if not isinstance(part, int):
            fields = (each.model_fields[part] for each in models if part in each.model_fields)
            models = [nested for field in fields for nested in _nested_models(field)]
    return tuple(dict.fromkeys(key for each in models for key in each.model_fields))


def _nested_models(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the models of a field's values, as they are in the run file."""
    read = (getattr(one, "json_schema_input_type", PydanticUndefined) for one in field.metadata)
    written = next((one for one in read if one is not PydanticUndefined), field.annotation)
    return list(_models_in(written))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
