"""What counts as equal where people differ. Every default is the strict reading; a run may choose the other."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EqualityPolicy:
    """The choices that the equality of two answers depends on. Part of what a cached verdict is remembered by."""

    chains: Literal["each", "last"] = "each"
    """Of `x = 3 + 4 = 8`: each side must be the value, or the last one alone counts (math-verify's rule)."""
    bare_braces: Literal["set", "group"] = "set"
    """`{1, 2}` without backslashes is a set, as people type it, or the bare list `1, 2`, as TeX prints it."""
    relations_as_sets: bool = True
    """The set `(1, 2)` may be answered by the relation `1 < x < 2`."""
    any_names: bool = False
    """Variables count by their place: `f(x)` is `f(y)`."""
    decimal_places: int = 6
    """Two numbers, one of them a decimal, are equal if they agree in so many places."""
    guards: bool = True
    """False: read and decide as math-verify alone does."""
    formulas_only: bool = False
    """With `guards` off: math-verify reads formulas in dollar signs and the like, no bare numbers."""

    def as_request(self) -> dict[str, Any]:
        """Return the fields as a worker is sent them."""
        return asdict(self)


STRICT = EqualityPolicy()
