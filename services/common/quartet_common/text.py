"""Text from outside: made valid for messages, and safe to print.

Control characters would act on the terminal, and a line feed could forge a log line.
"""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from textwrap import indent

# C0 except tab and line feed, DEL, C1, marks of text direction, Unicode's line breaks, lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def encodable(text: str, most: int | None = None) -> str:
    """Return text that a protobuf field can hold: lone surrogates are escaped, as `\\ud800`.

    Args:
        most: maximum characters; longer text is truncated and ends in "…".
    """
    text = text[: None if most is None else most + 1].encode(errors="backslashreplace").decode()
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def error_text(error: BaseException) -> str:
    """Return type and text of any exception, "KeyError: 'a'", at most 500 characters; its `__str__` may raise."""
    try:
        said = str(error)
    except Exception as failure:
        said = f"its text cannot be made ({type(failure).__name__})"
    return encodable(f"{type(error).__name__}: {said}", 500)


def visible(text: str) -> str:
    """Return text with control characters escaped as in JSON, so that JSON keeps its meaning."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return `visible` text with line feeds escaped too."""
    return visible(text).replace("\n", "\\n")


def block(text: str) -> str:
    """Return `visible` text with all lines after the first indented, so that none passes for a line of the log."""
    return indent(visible(text), "    ").removeprefix("    ")


# Beyond so many kinds, the least recently seen one is deleted.
_MOST = 1000
_REPEAT_SECONDS = 60.0
_NUMBER = re.compile(r"\d+")


def without_numbers(text: str) -> str:
    """Return a text with each number replaced by 0, equal for texts that differ only in numbers."""
    return _NUMBER.sub("0", text)


class Repeats:
    """Limits messages to one of a kind per minute, and counts those in between."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def count(self, what: Hashable) -> int | None:
        """Count a message. Return the number suppressed since the last one, if this one is to be shown; else None."""
        shown, since = self._known.pop(what, (-math.inf, 0))
        now = time.monotonic()
        is_due = now - shown >= _REPEAT_SECONDS
        self._known[what] = (now, 0) if is_due else (shown, since + 1)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return since if is_due else None

    def left(self) -> Iterator[tuple[Hashable, int]]:
        """Yield the kinds with suppressed messages, and their number."""
        return ((what, since) for what, (_, since) in self._known.items() if since)
