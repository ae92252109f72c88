"""What is written to a terminal: no text of a policy, a service or a file can steer it. A small line chart."""

from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from quartet_common.text import one_line, visible


class Terminal(Console):
    """A rich console that shows a `str` on one line and as it stands, without markup, and a `Text` as a block.

    Control characters of both are escaped.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See `Console.render_str`."""
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        if isinstance(renderable, Text) and visible(renderable.plain) != renderable.plain:
            escaped = renderable.blank_copy()
            for part in renderable.render(self):
                escaped.append(visible(part.text), part.style)
            renderable = escaped
        return super().render(renderable, options)


def complain(error: Exception, ending: str = "") -> None:
    """Print what is wrong to standard error: of a ConfigError each of its problems, a line each."""
    for problem in getattr(error, "problems", (str(error),)):
        echo(f"quartet: {problem}{ending}", err=True)


def echo(line: object, err: bool = False) -> None:
    """Print a line, control characters escaped."""
    click.echo(one_line(str(line)), err=err)


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
