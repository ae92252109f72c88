"""Writes run files; tomllib only reads."""

import json
import re
from collections.abc import Mapping
from typing import Any


def run_file_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections as TOML; those without a key are left out."""
    parts = []
    for name, values in sections.items():
        if values:
            parts.append("\n".join([f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
