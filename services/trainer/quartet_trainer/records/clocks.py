"""How far another host's clock is from ours, told from what must have happened before what."""

from collections import deque

# Clocks drift, and are set: what was seen longer ago than this many exchanges says nothing of now.
_EXCHANGES = 256


class Offset:
    """What must be added to a time of another clock to have it in ours; seconds throughout.

    Each exchange bounds it from both sides: what they did after something of ours and before something else of ours
    stands between the two in our time. The bounds of many exchanges together are tight, as in Cristian's method
    (Distributed Computing 3, 1989), and an order of events that they know is never shown reversed.
    """

    def __init__(self) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=_EXCHANGES)

    def happened(self, after: float, theirs: float, before: float, theirs_later: float | None = None) -> None:
        """Something happened at `theirs` of their clock, after `after` and before `before` of ours.

        `theirs_later`: it lasted until then, all of it between the two.
        """
        self._bounds.append((after - theirs, before - (theirs if theirs_later is None else theirs_later)))

    @property
    def seconds(self) -> float | None:
        """The middle of what the exchanges allow; None before the first.

        Where the newest contradict older ones, a clock was set in between: only what agrees with the newest counts.
        """
        if not self._bounds:
            return None
        low, high = self._bounds[-1]
        for lower, higher in reversed(self._bounds):
            narrowed = max(low, lower), min(high, higher)
            if narrowed[0] > narrowed[1]:
                break
            low, high = narrowed
        return (low + high) / 2
