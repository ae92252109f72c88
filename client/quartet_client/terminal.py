"""What is written to a terminal: no text of a policy, a service or a file can steer it. Charts of one line."""

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
    """Return `values` as one row of blocks, at most `width` characters; values that do not fit are averaged.

    Args:
        low, high: the scale's ends; by default the values' own. The lowest value still shows: its block is an eighth.
    """
    if not values or width < 1:
        return ""
    shares = _resample(values, width)
    bottom = min(shares) if low is None else low
    span = (max(shares) if high is None else high) - bottom
    return "".join(_EIGHTHS[1 if span <= 0 else max(1, min(8, round((x - bottom) / span * 8)))] for x in shares)


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    shares = []
    for column in range(width):
        begin, end = column * len(values) // width, (column + 1) * len(values) // width
        part = values[begin:end]
        shares.append(sum(part) / len(part))
    return shares
