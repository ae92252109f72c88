"""Reads the run file: one TOML file for a whole run, and command-line overrides (`--set rollout.engine=transformers`).

`config` validates what this module reads.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quartet_common.refusals import keys_named, meant, without_passwords


class ConfigError(Exception):
    """The configuration cannot be used.

    Attributes:
        problems: one sentence each; the error's text has one per line.
        exit_code: exit status of a service that ends with this error.
    """

    exit_code = 2

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class Problems:
    """Collects the problems that independent checks find, so that all of them are reported at once.

    As a context manager it raises ConfigError with all problems at its end.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    @property
    def found(self) -> bool:
        """Whether there is a problem."""
        return bool(self._found)

    def add(self, *problems: str) -> None:
        """Add sentences, without duplicates."""
        self._found = list(dict.fromkeys((*self._found, *problems)))

    @contextmanager
    def collecting(self, *kinds: type[Exception]) -> Iterator[None]:
        """Wrap a check: add what it raises, a ConfigError or one of `kinds`, whose text is the sentence."""
        try:
            yield
        except ConfigError as error:
            self.add(*error.problems)
        except kinds as error:
            self.add(str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None and self._found:
            raise ConfigError(*self._found)


@dataclass(frozen=True)
class RunFile:
    """The values of file and command line, not validated.

    Attributes:
        tree: the sections, overrides applied.
        name: the file, for errors; empty: there is none.
        overridden: the keys that `--set` gave, each as its parts.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    overridden: frozenset[tuple[str, ...]] = frozenset()

    @classmethod
    def read(cls, path: Path | None, overrides: Sequence[str]) -> "RunFile":
        """Read the file, if any, and apply overrides `key=value`. Raises ConfigError."""
        tree = _read_toml(path) if path else {}
        with Problems() as problems:
            overridden = []
            for override in overrides:
                with problems.collecting():
                    overridden.append(_apply_override(tree, override))
            for key, value in _texts(tree):
                if (expanded := os.path.expandvars(os.path.expanduser(value))) != value and _UNEXPANDED.match(value):
                    problems.add(f"{key}: got '{value}'; nothing is expanded here: write '{expanded}'")
        return cls(tree, str(path or ""), frozenset(overridden))

    def section(self, name: str) -> dict[str, Any]:
        """Return the values of a section; empty if it is missing or no section."""
        values = self.tree.get(name, {})
        return values if isinstance(values, dict) else {}

    def where(self, key: Sequence[str | int]) -> str:
        """Return where a key, given as its parts, was set: "in run.toml", "in --set", or both for a section."""
        parts = tuple(map(str, key))
        if any(parts[: len(given)] == given for given in self.overridden) or (self.overridden and not self.name):
            return "in --set"
        if not self.name:
            return "on the command line"
        partly = any(given[: len(parts)] == parts for given in self.overridden)
        return f"in {self.name}{' and --set' if partly else ''}"


_UNEXPANDED = re.compile(r"(~\w*|\$\w+|\$\{\w+\})/")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in tables and lists, each with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts(each, f"{key}[{index}]")


def read_text(path: Path, key: str) -> str:
    """Read a file named by a configuration key. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read '{path}': {_os_reason(error)}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    text = read_text(path, "run file")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"run file {path} is not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # also a number of thousands of digits
        place = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1].strip() if place else ""
        raise ConfigError(f"run file {path} is not valid TOML: {error}{_toml_cure(str(error), line)}") from error


_PYTHON = {"True": "true", "False": "false", "None": "", "null": "", "~": ""}


_TOML_CURES = {
    "Cannot declare": "a section is written once: join the two",
    "Cannot overwrite": "a key is written once: remove one",
    r"'\n'": "close the quotes on the same line",
    "Invalid initial character": "a table in braces is on one line; a longer one is a section of its own",
    "Expected newline": "one key a line; a comment begins with #",
    "Unclosed array": "between its items are commas, and ] at its end",
    "Invalid statement": "the file is TOML: sections such as [run], then a line key = value each",
}


def _toml_cure(reason: str, line: str) -> str:
    """Return the line at which reading ends for this reason, and how to write it; "" for no line."""
    if not line:
        return ""
    key, equals, value = (part.strip() for part in line.partition("="))
    bare = value.partition(" #")[0].strip()
    yaml = re.fullmatch(r"([\w.-]+):\s*(.*)", line)
    cure = next((cure for words, cure in _TOML_CURES.items() if words in reason), "")
    if bare in _PYTHON:
        now = _PYTHON[bare]
        cure = f"write {key} = {now}" if now else f"leave {key} out for its default: TOML has no {bare}"
    elif yaml and not equals:
        cure = f"write {yaml[1]} = {yaml[2]}" if yaml[2] else f"write [{yaml[1]}]"
    elif re.fullmatch(r"[^,]+,", bare):
        cure = f"write {key} = {bare[:-1].strip()}: no comma ends a line"
    elif re.match(r"[-+]?\d[\d._]*(e[-+]?\d+)?\s*([a-zA-Z%*^]|/(?!/))", bare):
        cure = "a number is in digits, without a unit or a calculation"
    elif re.fullmatch(r"[.]\d+|\d+[.]", bare):
        cure = f"write {key} = {float(bare)}"
    elif re.match(r"[“”‘’]|\"[^\"]*\\|[A-Za-z_/~.][^\"'{}]*$", bare):
        cure = f"text is in quotes: {key} = '…'"
    elif line.startswith("[") and not line.endswith("]"):
        cure = f"write {line}]"
    return f": {without_passwords(line)}{cure and '; '}{cure}"


def _os_reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


_NAMED = (("run", "environment"), ("trainer", "algorithm"))
"""Tables whose name alone stands for them."""


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Change the tree and return the key's parts. Raises ConfigError."""
    key, equals, text = override.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or len(parts) < 2 or not all(parts):
        own = next(iter(keys_named(parts[-1])), "rollout.engine")
        raise ConfigError(
            f"--set {override}: an override is section.key=value, e.g. {own}={text or 'transformers'}{meant(parts)}"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare string: no quotes needed at a command line
    node = tree
    for depth, part in enumerate(parts[:-1], 1):
        if parts[:depth] in _NAMED and isinstance(node.get(part), str):
            node[part] = {"name": node[part]}
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: '{part}' is a value, not a section")
    node[parts[-1]] = value
    return parts


def run_file_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections as TOML, without empty ones."""
    parts = []
    for name, values in sections.items():
        if values:
            parts.append(
                "\n".join([f"[{name}]", *(f"{_key(key)} = {toml_value(value)}" for key, value in values.items())])
            )
    return "\n\n".join(parts) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def toml_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
