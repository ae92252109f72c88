"""Reads the fenced blocks of a completion, in linear time: it may be megabytes of anything."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Literal

Tag = Literal["python", "", "other"]


@dataclass(frozen=True, slots=True)
class Fence:
    """An opening fence."""

    marks: str
    tag: Tag
    """Its language; "" if it names none."""
    indent: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """The content of a fence, without the fence's indentation."""

    fence: Fence
    content: str
    closed: bool


# "python3", "py", "Python 3.11", "{python}", "{.python .numberLines}", "python title=…"; not "pycon" and "python-repl".
_PYTHON = r"[ \t]*+\{?[ \t]*+\.?(?:[ic]?python(?!\d*[-_ ]?(?:repl|console|output|traceback))|pypy|py)(?![a-z])"
_OPENING = re.compile(
    rf"""^(?P<indent>[ \t]*+)(?P<marks>`{{3,}}+|~{{3,}}+)(?P<info>[^\n`]*+)(?:\n|\Z)
    |(?<!`)(?P<after_text>`{{3,}}+){_PYTHON}[^\n`]*+\n
    |(?<!`)`{{3,}}+{_PYTHON}[\d.]*+[ \t]++(?P<line>[^\n`]++)`{{3,}}+""",
    re.MULTILINE | re.IGNORECASE | re.VERBOSE,
)
_LANGUAGE = re.compile(rf"{_PYTHON}|[a-z][\w+#.-]*+[ \t\r]*+$", re.IGNORECASE | re.MULTILINE)
_REST_IS_BLANK = re.compile(r"[ \t\r]*+$", re.MULTILINE)
_TAG = re.compile(_PYTHON, re.IGNORECASE)
_NAME_OF_PYTHON = re.compile(r"\s*python3?[ \t]*\n", re.IGNORECASE)

# What Python reads as comment or string holds no closing fence. `open`: a text without its end.
_TEXTS = r"""\#[^\n]*+
    |\"\"\"[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+\"\"\"|'''[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*+'''|(?P<open>\"\"\"|''')
    |"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'"""
# Blocks in which a text has no end, after which the rest is read without regard to texts: each was perhaps read
# to the completion's end.
_MOST_FAILURES = 8
_MOST_INDENT = 200
_MOST_BLOCKS = 10_000
_NO_FENCE = Fence("```", "python")


def blocks(text: str, first: Fence | None = None) -> list[Block]:
    """Return the blocks in order. `first`: a fence that stands before the text and is open at its beginning.

    Of more than `_MOST_BLOCKS`, which no honest text has, the first ones.
    """
    return list(islice(_blocks(text, first), _MOST_BLOCKS))


def outside_texts(text: str) -> str:
    """Return what precedes the first fence that is not within a string or comment of Python."""
    ends = _end(text, 0, _NO_FENCE, by_python=True)
    return text if ends is None else text[: ends[0]]


def _blocks(text: str, fence: Fence | None) -> Iterator[Block]:
    position, failures = 0, 0
    while True:
        if fence is None:
            opening = _OPENING.search(text, position)
            if opening is None:
                return
            position = opening.end()
            if opening["line"] is not None:
                yield Block(_NO_FENCE, opening["line"], True)
                continue
            fence = Fence(opening["marks"] or opening["after_text"], _tag(opening), opening["indent"] or "")
        by_python = _end(text, position, fence, True) if failures < _MOST_FAILURES else None
        failures += by_python is None
        start, after, closed = by_python or _end(text, position, fence, False) or _unclosed(text)
        content = _unindented(text[position:start], fence.indent)
        named = None if fence.tag else _NAME_OF_PYTHON.match(content)
        if named:
            fence, content = replace(fence, tag="python"), content[named.end() :]
        yield Block(fence, content, closed)
        position, fence = after, None


def _tag(opening: re.Match[str]) -> Tag:
    info = opening["info"]
    if info is None or _TAG.match(info):
        return "python"
    return "other" if info.strip(" \t\r{}") else ""


def _end(text: str, position: int, fence: Fence, by_python: bool) -> tuple[int, int, bool] | None:
    """Return where a block's content ends, where to read on, and whether a closing fence is there.

    `by_python`: pass over Python's strings and comments; None: a string has no end.
    """
    for token in _tokens(fence.marks, by_python).finditer(text, position):
        if token["marks"] is None:
            if token["open"]:
                return None
            continue
        at = token.start("marks")
        before = text[max(position, at - _MOST_INDENT) : at]
        begins_line = not before.rpartition("\n")[2].strip() and (len(before) < _MOST_INDENT or "\n" in before)
        if begins_line and _LANGUAGE.match(text, token.end()):  # another block begins: this one has no end
            line = at - len(before.rpartition("\n")[2])
            return line, line, False
        if begins_line or fence.tag == "python" or _REST_IS_BLANK.match(text, token.end()):
            return at, token.end(), True
    return _unclosed(text)


@lru_cache(maxsize=64)
def _tokens(opened: str, by_python: bool) -> re.Pattern[str]:
    """Return the pattern of the marks that close a fence, and of Python's strings and comments if so told."""
    mark = opened[0]
    begins = "" if by_python and mark == "`" else r"^[ \t]*+"
    marks = rf"{begins}(?P<marks>(?<!{mark}){mark}{{{len(opened)},}}+)"
    return re.compile(rf"{_TEXTS}|{marks}" if by_python else marks, re.MULTILINE | re.DOTALL | re.VERBOSE)


def _unclosed(text: str) -> tuple[int, int, bool]:
    return len(text), len(text), False


def _unindented(text: str, indent: str) -> str:
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", text, flags=re.MULTILINE) if indent else text
