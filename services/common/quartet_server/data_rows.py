"""Reads the prompts that [data] names, for a service's checks before its start.

Missing files and invalid lines are skipped: the client reports them. `quartet run` converts other sources to JSONL for
the services.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quartet_common.sections import by_name
from quartet_common.sources import as_table, data_sources

ModelT = TypeVar("ModelT", bound=BaseModel)


def data_rows(data: Mapping[str, Any], field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, "FILE, line 7", and content of each row.

    Args:
        data: the section [data].
        field: only rows with this key at their top level.
    """
    for path in _files(data):
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if field not in line:
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and (not field or field in row):
                    yield f"{path}, line {number}", row


def sections_of_rows(data: Mapping[str, Any], field: str, section: type[ModelT]) -> Iterator[tuple[str, ModelT]]:
    """Yield each distinct section that rows have in `field`, with its first place: "FILE, line 7: verifiers[0]".

    Args:
        field: of a row: a section, its name alone, or a list of them. Other values are skipped.
    """
    seen = set()
    for where, row in data_rows(data, field):
        many = isinstance(row[field], list)
        for i, value in enumerate(row[field] if many else [row[field]]):
            if repr(value) in seen:
                continue
            seen.add(repr(value))
            if isinstance(value, dict):
                value = {key: each for key, each in value.items() if each is not None}
            with suppress(ValidationError):
                one = section.model_validate(by_name(value))
                yield f"{where}: {field}{f'[{i}]' if many else ''}", one


def _files(data: Mapping[str, Any]) -> list[Path]:
    tables = [as_table(source) for _, source in data_sources(data)]
    named = [table.get("path") for table in tables if isinstance(table, dict) and not table.get("fields")]
    return [
        path for name in named if isinstance(name, str) and (path := Path(name)).is_file() and path.suffix != ".parquet"
    ]
