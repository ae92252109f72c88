"""Terminal output. Texts of models, services and files are untrusted: their control characters are escaped."""

from collections.abc import Iterable
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
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and visible(renderable.plain) != renderable.plain:
            escaped = renderable.blank_copy()
            for part in renderable.render(self):
                escaped.append(visible(part.text), part.style)
            renderable = escaped
        return super().render(renderable, options)


def print_error(error: Exception, ending: str = "") -> None:
    """Print an error to standard error, each of the problems of a ConfigError on a line of its own."""
    for problem in getattr(error, "problems", (str(error),)):
        echo(f"quartet: {problem}{ending}", err=True)


def echo(line: object, err: bool = False) -> None:
    """Print a line, control characters escaped."""
    click.echo(one_line(str(line)), err=err)
