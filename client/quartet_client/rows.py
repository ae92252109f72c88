"""The rows of a source as they are: lines of JSON, a table, a function's, or a dataset of the hub."""

import difflib
import importlib
import json
import logging
import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from quartet_client.errors import InputError
from quartet_common.config import ConfigError
from quartet_common.hub import check_dataset, hub_sentence, is_hub_id
from quartet_common.python_file import FileError, describe, install_command, load_callable
from quartet_common.sources import RowSource
from quartet_common.text import encodable
from quartet_common.values import json_object

STDIN = Path("-")
_FILE_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NO_JSON = (date, time, timedelta, Decimal, UUID)  # become text; a datetime is a date

Row = tuple[str, Any]
"""A row with its place in its source, "line 7" or "row 7"."""


def source_rows(source: RowSource, key: str) -> Iterator[Row]:
    """Yield the rows of a file, a function or a dataset; arguments and errors as `DataSource.rows`."""
    if source.path is None:
        return _rows_of_dataset(source, key)
    if _FILE_FUNCTION.fullmatch(str(source.path)) or _MODULE_FUNCTION.fullmatch(str(source.path)):
        return _rows_of_function(str(source.path))
    if source.path.suffix == ".parquet":
        return _rows_of_parquet(source.path, key)
    return _rows_of_lines(source.path, key)


def parse_lines(lines: Iterable[str], name: str) -> Iterator[Row]:
    """Yield the objects of JSONL; blank lines are skipped. `name` says in errors where the lines are from."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"line {number}", _parse_json(line, f"{name}, line {number}")


def _rows_of_lines(path: Path, key: str) -> Iterator[Row]:
    if path == STDIN:
        with _readable(Path("standard input")):
            yield from parse_lines(sys.stdin, "standard input")
        return
    if not path.suffix and is_hub_id(path):
        raise InputError(
            f"{key}: there is no file '{path}'; allowed, if it is a dataset of the hub: {{ dataset = \"{path}\" }}"
        )
    with _readable(path, f"{key}: "), path.open(encoding="utf-8-sig") as lines:
        suffix = path.suffix.lower()
        head = "" if suffix in _PACKED else lines.read(_HEAD)
        first = head.partition("\n")[0]
        form = ";" if suffix == ".csv" and first.count(";") > first.count(",") else suffix
        if reads := _READERS.get("array" if head.lstrip().startswith("[") else form):
            words, reader = reads
            opened = f"open('{path}', encoding='utf-8-sig')"
            command = f"import csv, json; [print(json.dumps(row)) for row in {reader}({opened})]"
            raise InputError(
                f"{key}: '{path}' is {words}; allowed: JSONL, one JSON object a line, or Parquet; convert it: "
                f'python3 -c "{command}" > {path.with_suffix("")}-rows.jsonl'
            )
        if suffix in _PACKED:
            raise InputError(f"{key}: '{path}' is compressed; allowed: JSONL or Parquet; unpack it")
        lines.seek(0)
        yield from parse_lines(lines, str(path))


_HEAD = 1 << 12
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_READERS = {
    "array": ("a JSON array", "json.load"),
    ".csv": ("a table of comma-separated values", "csv.DictReader"),
    ";": ("a table of values with semicolons", "(lambda file: csv.DictReader(file, delimiter=';'))"),
    ".tsv": ("a table of tab-separated values", "(lambda file: csv.DictReader(file, dialect='excel-tab'))"),
}
"""The forms of files that are often given as JSONL, and what reads them."""


def _parse_json(line: str, where: str) -> dict:
    try:
        value = json.loads(line.rstrip(), object_pairs_hook=json_object)
    except json.JSONDecodeError as error:
        shown = encodable(line.strip(), 60)
        reason = error.msg[0].lower() + error.msg[1:]
        raise InputError(f"{where}: not valid JSON: {reason} at column {error.colno} of '{shown}'; {_LINES}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: got {type(value).__name__}; {_LINES}")
    return value


_LINES = "allowed: one JSON object a line, with double quotes and no comma after it"


@contextmanager
def _readable(path: Path, key: str = "") -> Iterator[None]:
    """Turn errors of reading a file into InputError, which `key` begins."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{key}cannot read '{path}': {reason}{_instead(path)}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{key}cannot read '{path}': it is not UTF-8 text (byte {error.start}); allowed: JSONL in UTF-8, or Parquet"
        ) from error


def _instead(path: Path) -> str:
    """Return what may have been meant by a path that is no file."""
    if path.is_dir():
        return "; allowed: a JSONL or Parquet file, or a function that returns rows"
    if path.exists() or path.is_symlink():
        return ""
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1)
    if close:
        return f"; did you mean '{path.with_name(close[0])}'?"
    return "" if path.is_absolute() else f"; it would be '{path.absolute()}'"


def _rows_of_parquet(path: Path, key: str) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path}: Parquet needs the package pyarrow, not installed here; install it: {install_command('datasets')}"
        ) from error
    with _readable(path, f"{key}: "), path.open("rb") as file:
        try:
            rows = (row for batch in ParquetFile(file).iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", row
        except ArrowException as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{key}: cannot read '{path}': it is not a complete Parquet file: {reason}") from error


def _rows_of_dataset(source: RowSource, key: str) -> Iterator[Row]:
    name = source.dataset
    try:
        check_dataset(name, source.revision, f"{key}.dataset")
        import datasets
    except ImportError as error:
        raise InputError(
            f"{key}.dataset: datasets of the hub need the package datasets, not installed here; install it: "
            f"{install_command('datasets')}"
        ) from error
    except ConfigError as error:
        raise InputError(str(error)) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error says what failed, once
    try:
        read = datasets.load_dataset(
            name, source.name or None, split=source.split or "train", revision=source.revision or None
        )
    except ValueError as error:  # datasets has no class for an unknown configuration or split
        reason = " ".join(str(error).partition("Example of usage")[0].split())
        wrong = "split" if "split" in reason.lower() else "name" if "config" in reason.lower() else "dataset"
        raise InputError(f"{key}.{wrong}: {name}: {reason[:1].lower()}{reason[1:]}") from error
    except Exception as error:  # of datasets, huggingface_hub, the HTTP library beneath, the disk
        raise InputError(hub_sentence(error, name, source.revision, f"{key}.dataset", "dataset")) from error
    for number, row in enumerate(read, start=1):
        yield f"row {number}", row


def plain(value: Any) -> Any:
    """Convert what a row has to JSON values: dates and the like become text, bytes too, as UTF-8 or base64.

    A null is a key not given, since in a table every row has the keys of all rows; in a list it stays.
    """
    match value:
        case dict():
            return {key: plain(each) for key, each in value.items() if each is not None}
        case list() | tuple():
            return [plain(each) for each in value]
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return b64encode(value).decode()
    return str(value) if isinstance(value, _NO_JSON) else value


def _rows_of_function(function: str) -> Iterator[Row]:
    """Yield what a function of a Python file, or of an installed module, returns."""
    place, _, name = function.rpartition(":")
    number = 0
    try:
        in_file = _FILE_FUNCTION.fullmatch(function)
        rows = load_callable(function) if in_file else getattr(importlib.import_module(place), name, None)
        if not callable(rows):
            raise InputError(f"'{place}' has no function '{name}'")
        for number, row in enumerate(rows(), start=1):
            yield f"row {number}", row
    except FileError as error:
        raise InputError(str(error)) from error
    except InputError:
        raise
    except Exception as error:  # it is the user's program
        after = f" after row {number}" if number else ""
        raise InputError(f"{function}: it {describe(error, place)['reason']}{after}") from error
