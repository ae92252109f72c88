"""What is wrong with a section of the run file, in one sentence: the key, what came, what is allowed, where."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def sentence(model: type[BaseModel], error: ValidationError, name: str, where: str) -> str:
    """Return the first problem of section `name`, e.g. "trainer", as a sentence without secrets.

    Args:
        model: the section's model, by which an unknown key's neighbours are told.
        error: what pydantic found.
        name: the section's name in the run file.
        where: where the values came from, e.g. "in run.toml".
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    key = ".".join([name, *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden":
        allowed = _keys_at(model, first["loc"][:-1])
        told = f"unknown key {key} {where}{did_you_mean(str(first['loc'][-1]), allowed)}"
    elif first["type"] == "missing":
        told = f"{key} is missing {where}: it has no default"
    else:
        message = first["msg"].removeprefix("Value error, ")
        came = "" if isinstance(first["input"], (dict, BaseModel)) else f"got {_without_passwords(first['input'])} "
        told = f"{key}: {came}{where}: {message[0].lower()}{message[1:]}"
    more = len(problems) - 1
    return told + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def _without_passwords(value: Any) -> str:
    """Return a value as it may be shown: a URL without the password in it."""
    return re.sub(
        r"(://[^:@/\s]*:)\S*@|(password=)[^&\s'\"]*", lambda m: f"{m[1]}***@" if m[1] else f"{m[2]}***", repr(value)
    )


def _keys_at(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the keys allowed in the (sub)section at `loc`, following nested models."""
    for part in loc:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        nested = _nested_model(info.annotation) if info else None
        if nested is None:
            return ()
        model = nested
    return tuple(model.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        nested = _nested_model(argument)
        if nested is not None:
            return nested
    return None


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest of those allowed, or all of them."""
    close = difflib.get_close_matches(name, allowed, n=1)
    if close:
        return f": did you mean '{close[0]}'?"
    return f"; allowed: {', '.join(sorted(allowed))}" if allowed else ""
