"""The prompts that [data] names, as far as a service needs them for its checks before the start.

Files that are not on this host, and lines that are no prompts, are the client's business.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def data_rows(data: Mapping[str, Any], field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row and where it stands, "FILE, line 7".

    Args:
        data: the section [data].
        field: only rows with this key at their top level.
    """
    for path in _files(data):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if field not in line:
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and (not field or field in row):
                    yield f"{path}, line {number}", row


def _files(data: Mapping[str, Any]) -> list[Path]:
    evaluation = data.get("evaluation", {})
    named = [data.get("train"), *(evaluation.values() if isinstance(evaluation, dict) else ())]
    return [path for name in named if isinstance(name, str) and (path := Path(name)).is_file()]
