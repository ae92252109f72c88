"""Text that programs and people elsewhere chose: as messages can carry it, and as it may be shown.

Terminals obey control characters, and a line feed forges a line.
"""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from textwrap import indent

# C0 but tab and line feed, DEL, C1, what changes the direction of text, Unicode's own line breaks, lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def encodable(text: str, most: int | None = None) -> str:
    """Return text that UTF-8, and so a protobuf field, can hold: a lone surrogate becomes its escape, `\\ud800`.

    Args:
        most: characters; longer text is cut and ends in "…".
    """
    text = text[: None if most is None else most + 1].encode(errors="backslashreplace").decode()
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def error_text(error: BaseException) -> str:
    """Return "KeyError: 'a'" of any exception, at most 500 characters; its own text may fail."""
    try:
        said = str(error)
    except Exception as failure:
        said = f"its text cannot be made ({type(failure).__name__})"
    return encodable(f"{type(error).__name__}: {said}", 500)


def visible(text: str) -> str:
    """Return a block of text with its control characters escaped as JSON escapes them: JSON stays the same JSON."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return `visible` text with its line feeds escaped, too."""
    return visible(text).replace("\n", "\\n")


def block(text: str) -> str:
    """Return `visible` text whose lines after the first are indented: none of them passes for a line of its own."""
    return indent(visible(text), "    ").removeprefix("    ")


# Of more than so many, the one that was silent the longest begins anew.
_MOST = 1000
_REPEAT_SECONDS = 60.0
_NUMBER = re.compile(r"\d+")


def without_numbers(text: str) -> str:
    """Return what texts that differ in numbers only have in common."""
    return _NUMBER.sub("0", text)


class Repeats:
    """When each was shown last, and how often it has come since: one of a kind is shown in a minute."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def count(self, what: Hashable) -> int | None:
        """Return how often `what` came since it was shown last, if it is to be shown now; else None."""
        shown, since = self._known.pop(what, (-math.inf, 0))
        now = time.monotonic()
        is_due = now - shown >= _REPEAT_SECONDS
        self._known[what] = (now, 0) if is_due else (shown, since + 1)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return since if is_due else None

    def left(self) -> Iterator[tuple[Hashable, int]]:
        """Yield what came since it was shown last, with how often."""
        return ((what, since) for what, (_, since) in self._known.items() if since)
