"""Names in code font exist in the contract, the run file or the code."""

import re
from functools import cache
from pathlib import Path

import pytest
import run_file
from pages import ROOT, WRITTEN, code_spans, name_of

# Names of libraries, other projects, systemd, Redis and HTTP that the docs use.
OTHERS = set((Path(__file__).parent / "other_names.txt").read_text().split())
FOLDERS = ("benchmarks", "client", "deploy", "docs", "examples", "protos/quartet", "services", "tests")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SOURCES = (
    ".py",
    ".proto",
    ".lua",
    ".toml",
    ".yaml",
    ".json",
    ".sh",
    ".js",
    ".css",
    ".html",
    ".service",
    ".env",
    ".txt",
)


@cache
def identifiers() -> frozenset[str]:
    """Return all words of the checkout's sources and file names, except pages and these tests."""
    words = set(WORD.findall((ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            name = str(path.relative_to(ROOT))
            words.update(WORD.findall(name))
            if path.suffix in SOURCES and not name.startswith(("docs/run-file", "tests/docs/")) and path.is_file():
                words.update(WORD.findall(path.read_text(errors="ignore")))
    return frozenset(words)


def is_identifier(word: str) -> bool:
    """Return whether the sources have a word; `_end` and `beginning_` match longer names."""
    if word.endswith("_") or word.startswith("_"):
        return any(one.startswith(word) if word.endswith("_") else one.endswith(word) for one in identifiers())
    return word in identifiers()


@cache
def keys() -> tuple[set[str], set[str]]:
    return run_file.keys(run_file.read_schemas())


def looks_like_a_name(word: str) -> bool:
    """Return whether a word is in CamelCase, UPPER_CASE or snake_case."""
    return bool(re.search(r"[a-z][A-Z]|_[a-z0-9]|[A-Z]_[A-Z]", word))


def unknown(span: str) -> list[str]:
    """Return the unknown names of a code span."""
    wrong = [
        word
        for word in WORD.findall(span)
        if looks_like_a_name(word) and word not in OTHERS and not is_identifier(word)
    ]
    return wrong + [key for key in dotted_keys(span) if not is_key(key)]


def dotted_keys(span: str) -> list[str]:
    """Return a run file's key in a code span: `run.max_steps`, `--set trainer.seed=1`, `[trainer.checkpoint]`."""
    known, _ = keys()
    sections = {key for key in known if "." not in key}
    found = re.fullmatch(r"(?:--set )?\[?\[?([a-z_]+(?:\.[a-z_]+)*)\]?\]?(?:\s*=.*)?", span)
    if not found:
        return []
    key = found[1]
    if key.rpartition(".")[2] in ("toml", "py", "md", "proto", "jsonl", "log", "json", "yaml", "lock"):
        return []
    is_table = span.startswith("[")
    return [key] if key.partition(".")[0] in sections and ("." in key or is_table) else []


def is_key(key: str) -> bool:
    known, free = keys()
    return key in known or any(key.startswith(f"{table}.") for table in free)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_names_in_code_font_are_of_something(page):
    assert not {span: wrong for span in code_spans(page) if (wrong := unknown(span))}


def test_every_promise_of_the_page_on_security_is_held_by_tests_that_are_there():
    page = (ROOT / "docs" / "security.md").read_text()
    rows = [line.split(" | ") for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 10 and {len(row) for row in rows} == {3}
    for promise, held, _ in rows[1:]:
        named = re.findall(r"`((?:tests|services|client|deploy)/[\w./-]+\.py)`", held)
        assert named, promise
        assert all("def test_" in (ROOT / path).read_text() for path in named), held
