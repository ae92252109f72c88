"""Lines of a log that somebody else can cause as often as they like: the first is written, then one a minute."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

_SECONDS = 60.0
# Of more than so many, the one that was silent the longest begins anew.
_MOST = 1000


class Repeats:
    """When each was written, and how often it has come since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._known: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def due(self, what: Hashable) -> int:
        """Count `what`; return 0 if it is not to be written now, else how often it came since it was."""
        written, times = self._known.pop(what, (-math.inf, 0))
        now, times = self._clock(), times + 1
        is_due = now - written >= _SECONDS
        self._known[what] = (now, 0) if is_due else (written, times)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return times if is_due else 0
