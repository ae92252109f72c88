"""Lines that may come again at any rate: the first is shown, then one a minute with a count."""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

# Of more than so many, the one that was silent the longest begins anew.
_MOST = 1000
_NUMBER = re.compile(r"\d+")


def without_numbers(text: str) -> str:
    """Return what texts that differ in numbers only have in common."""
    return _NUMBER.sub("0", text)


class Repeats:
    """When each was shown last, and how often it has come since.

    Args:
        seconds: one of a kind is shown in so many seconds.
    """

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._known: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def count(self, what: Hashable) -> int | None:
        """Return how often `what` came since it was shown last, if it is to be shown now; else None."""
        shown, since = self._known.pop(what, (-math.inf, 0))
        now = self._clock()
        is_due = now - shown >= self._seconds
        self._known[what] = (now, 0) if is_due else (shown, since + 1)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return since if is_due else None

    def left(self) -> Iterator[tuple[Hashable, int]]:
        """Yield what came since it was shown last, with how often."""
        return ((what, since) for what, (_, since) in self._known.items() if since)
