"""A small line chart in a terminal: block characters, eighths of a row high."""

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """Return the last of `values` as one row of blocks, at most `width` characters."""
    rows = columns(values, width, 1, low, high)
    return rows[0] if rows else ""


def columns(
    values: Sequence[float], width: int, height: int, low: float | None = None, high: float | None = None
) -> list[str]:
    """Return `values` as columns of blocks: `height` rows of at most `width` characters, top row first.

    Values that do not fit are averaged in equal shares. The lowest value still shows: its block is an eighth high.

    Args:
        low, high: the scale's ends; by default the values' own.
    """
    if not values or width < 1 or height < 1:
        return []
    shares = _resample(values, width)
    bottom = min(shares) if low is None else low
    top = max(shares) if high is None else high
    span = top - bottom
    steps = height * 8
    levels = [1 if span <= 0 else max(1, min(steps, round((value - bottom) / span * steps))) for value in shares]
    rows = []
    for row in range(height - 1, -1, -1):
        rows.append("".join(_EIGHTHS[max(0, min(8, level - row * 8))] for level in levels))
    return rows


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    shares = []
    for column in range(width):
        begin, end = column * len(values) // width, (column + 1) * len(values) // width
        part = values[begin:end]
        shares.append(sum(part) / len(part))
    return shares
