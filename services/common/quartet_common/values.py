"""Checks of values that messages can carry: UTF-8 text and finite numbers.

Python strings may hold lone surrogates, which no protobuf field takes, and Python reads NaN and Infinity from JSON.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.struct_pb2 import Struct, Value

from quartet_common.text import encodable

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
"""Of a run, an evaluation set, a source."""
NAME_ALLOWED = "1 to 64 of [a-zA-Z0-9._-], first a letter or digit"
_EXACT = 2**53
_FINITE = "a finite number"


def is_http_url(text: str) -> bool:
    """Return whether a text is an http(s) URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the host or the port is none
        return False


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, for `object_pairs_hook`. Raises ValueError: a key is there twice, one value lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'got "{next(key for key in keys if keys.count(key) > 1)}" twice; allowed: each key once')
    return value


def check_values(value: Any, key: str = "") -> None:
    """Check all text and all numbers in nested mappings and lists; other objects are ignored.

    Raises:
        ValueError: "KEY: got VALUE; allowed: …", where KEY is the path from `key`, e.g. `verifiers[0].weight`.
    """
    match value:
        case str() if encodable(value) != value:
            raise ValueError(f"{key}: got {ascii(value[:80])}; allowed: text without lone surrogates")
        case float() if not math.isfinite(value):
            raise ValueError(f"{key}: got {value}; allowed: {_FINITE}")
        case Mapping():
            for name, each in value.items():
                check_values(name, f"a key of {key}" if key else "a key")
                check_values(each, f"{key}.{name}" if key else str(name))
        case list() | tuple():
            for n, each in enumerate(value):
                check_values(each, f"{key}[{n}]")


def struct_content(struct: Struct, field: str, refusal: Callable[[str, object, str], Exception]) -> dict[str, Any]:
    """Return a Struct as a dictionary; whole numbers below 2^53 as int.

    Args:
        field: path of the struct, for errors.
        refusal: makes the error that is raised for a number that is not finite, from its field, what came and what is
            allowed.
    """
    return {name: _content(value, f"{field}.{name}", refusal) for name, value in struct.fields.items()}


def _content(value: Value, field: str, refusal: Callable[[str, object, str], Exception]) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return struct_content(value.struct_value, field, refusal)
        case "list_value":
            return [_content(each, f"{field}[{n}]", refusal) for n, each in enumerate(value.list_value.values)]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise refusal(field, number, _FINITE)
            return int(number) if abs(number) < _EXACT and number.is_integer() else number
        case "null_value" | None:
            return None
        case kind:
            return getattr(value, kind)
