"""Evaluation packs, GSM8K and others: packs.toml has them; here is what no map of columns can express."""

import base64
import json
import pickletools
import re
import tomllib
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quartet_common.references import program_text

Row = dict[str, Any]
_OF_THE_HUB = ("dataset", "name", "split", "revision")


@cache
def packs() -> dict[str, dict[str, Any]]:
    """Return the keys of each pack's source, by its name; packs.toml has them."""
    return tomllib.loads(Path(__file__).with_name("packs.toml").read_text(encoding="utf-8"))


def with_pack(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source's keys, completed by those of the pack that it names, if any; a path replaces its dataset.

    Raises:
        ValueError: there is no such pack.
    """
    if (name := source.get("pack")) is None:
        return dict(source)
    if name not in packs():
        raise ValueError(f"there is no pack {name!r}; allowed: {', '.join(packs())}")
    left_out = _OF_THE_HUB if {"path", "dataset"} & source.keys() else ()
    return {**{key: value for key, value in packs()[name].items() if key not in left_out}, **source}


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return a template with each {COLUMN} replaced by the row's text. Raises LookupError for a missing column."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in row:
            raise LookupError(f"has no column '{found[1]}'; there are {', '.join(map(str, row)) or 'none'}")
        return str(program_text(row[found[1]]))

    return re.sub(r"\{(\w+)\}", value, template).strip()


def converted(row: Row, pack: str) -> Row:
    """Return a row with the columns that its pack reads. Raises LookupError, ValueError.

    HumanEval: the prompt, which may have imports and helpers, comes before the program, a body or the whole function.
    LiveCodeBench: the private tests are JSON, or its text pickled, compressed and in base64. pickletools finds that
    text; nothing is unpickled, which would run code of the data.
    """
    if pack == "humaneval" and "prompt" in row:
        return {**row, "verifiers": [{"name": "code", "parameters": {"prefix": row["prompt"]}}]}
    if pack != "livecodebench" or not isinstance(private := row.get("private_test_cases"), str):
        return row
    if not private.lstrip().startswith("["):
        try:
            parts = pickletools.genops(zlib.decompress(base64.b64decode(private)))
            private = max((text for _, text, _ in parts if isinstance(text, str)), key=len)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"has private_test_cases of another form than LiveCodeBench's: {error}") from None
    name = json.loads(row.get("metadata") or "{}").get("func_name", "")
    return {**row, "private_test_cases": private, "entry_point": name}
