"""Supervised rows of Parquet files, functions and datasets of the hub as JSONL, which the trainer reads."""

import json
from pathlib import Path

from quartet_client.columns import mapped
from quartet_client.errors import InputError
from quartet_client.rows import plain, source_rows
from quartet_common.sft import SftSection


def write_lines(section: SftSection, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the rows of each source that is not JSONL as it stands to a file in `folder`.

    Returns:
        Settings that name the files; and for each prefix of an error about a line its replacement, the source's row.

    Raises:
        InputError: a source cannot be read, or a row is no object or lacks a column.
    """
    settings: list[str] = []
    titles: dict[str, str] = {}
    for number, (key, source) in enumerate(section.sources()):
        if source.is_lines:
            continue
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / f"{number}.jsonl"
        writing = file.with_suffix(".writing")
        with writing.open("w", encoding="utf-8") as lines:
            for place, row in source_rows(source, key):
                where = f"{source.title}, {place}"
                if not isinstance(row, dict):
                    raise InputError(f"{where}: got {type(row).__name__}; a row is an object")
                if source.fields:
                    found = mapped(row, source.fields, where, key)
                    row = {field: found[field] for field in source.fields if field in found}
                lines.write(json.dumps(plain(row), ensure_ascii=False, default=str) + "\n")
        writing.replace(file)
        settings.append(f"{key}={json.dumps(str(file), ensure_ascii=False)}")
        titles |= {f"{file}, line ": f"{source.title}, row ", str(file): source.title}
    return settings, titles
