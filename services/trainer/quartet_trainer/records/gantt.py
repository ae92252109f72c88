"""The Gantt trace of a run as a picture: a row for each part, a bar for each thing it did, seconds along the top.

Of a row whose bars overlap, e.g. verifications, the picture shows how many there are at a time.

`python -m quartet_trainer.records.gantt trace.json trace.png` draws one again, e.g. of a trainer that was killed.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, LABELS, ROW, EDGE = 1800, 260, 30, 36
"""Pixels: of the picture, of the names at the left, of a row, and of the strips for the scale and the legend."""
LINE = 22
"""Pixels of each line of the legend but the first."""
PALETTE = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac"),
    *("#1b5e20", "#7b1fa2", "#00838f", "#ad1457", "#5d4037", "#37474f"),
)

# Bars that touch may overlap by this much: times are rounded to microseconds.
_SAME_SECONDS = 2e-6


@dataclass(frozen=True)
class Span:
    """One bar; seconds since the first."""

    row: str
    name: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        """When it was over."""
        return self.began + self.seconds

    @property
    def kind(self) -> str:
        """The name without its number: "version" of "version 12"."""
        return re.sub(r"(?<=\S) \d+$", "", self.name)


def read_spans(trace: Path) -> list[Span]:
    """Read what `Trace` wrote; a last line that a kill left unfinished is passed over."""
    events = []
    for line in trace.read_text(encoding="utf-8").splitlines()[1:]:
        try:
            events.append(json.loads(line.removesuffix(",")))
        except ValueError:
            continue
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    bars = [event for event in events if event["ph"] == "X"]
    first = min((event["ts"] for event in bars), default=0)
    return [Span(rows[bar["tid"]], bar["name"], (bar["ts"] - first) / 1e6, bar["dur"] / 1e6) for bar in bars]


def at_once(spans: Sequence[Span]) -> list[tuple[float, float, int]]:
    """Return from when to when how many of the bars there are, where there are any."""
    changes: dict[float, int] = {}
    for span in spans:
        changes[span.began] = changes.get(span.began, 0) + 1
        changes[span.ended] = changes.get(span.ended, 0) - 1
    found, count, times = [], 0, sorted(changes)
    for begin, end in zip(times, times[1:], strict=False):
        count += changes[begin]
        if count:
            found.append((begin, end, count))
    return found


def overlap(spans: Sequence[Span]) -> bool:
    """Whether any two of the bars do."""
    ended = -math.inf
    for span in sorted(spans, key=lambda span: span.began):
        if span.began < ended - _SAME_SECONDS:
            return True
        ended = max(ended, span.ended)
    return False


def draw(trace: Path, picture: Path) -> None:
    """Draw `trace` as the PNG `picture`. A bar has at least one pixel."""
    spans = read_spans(trace)
    rows: dict[str, list[Span]] = {name: [] for name in sorted({span.row for span in spans}, key=_place)}
    for span in spans:
        rows[span.row].append(span)
    colours = {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(dict.fromkeys(span.kind for span in spans))}
    end = max((span.ended for span in spans), default=1.0) or 1.0
    scale = (WIDTH - LABELS - EDGE) / end
    bottom = EDGE + ROW * len(rows)
    font = ImageFont.load_default(13)
    legend = _legend(list(colours), font)
    image = Image.new("RGB", (WIDTH, bottom + EDGE + LINE * max((line for _, line, _ in legend), default=0)), "white")
    pen = ImageDraw.Draw(image)

    step = _step(end)
    for tick in range(math.floor(end / step) + 1):
        x = LABELS + tick * step * scale
        pen.line([(x, EDGE - 6), (x, bottom)], fill="#dddddd")
        pen.text((x, 8), f"{tick * step:g} s", fill="black", font=font)
    for number, (row, here) in enumerate(rows.items()):
        top, label = EDGE + number * ROW + 4, row
        if overlap(here):
            counts = at_once(here)
            most = max(count for _, _, count in counts)
            label = f"{row}, at most {most}"
            for begin, until, count in counts:
                height = max(2, round(count / most * (ROW - 8)))
                left, base = LABELS + begin * scale, top + ROW - 8
                right = left + max(1.0, (until - begin) * scale)
                pen.rectangle([(left, base - height), (right, base)], fill=colours[here[0].kind])
        else:
            for span in here:
                left = LABELS + span.began * scale
                right = left + max(1.0, span.seconds * scale)
                pen.rectangle([(left, top), (right, top + ROW - 8)], fill=colours[span.kind])
        pen.text((8, top + 3), _fitting(label, font), fill="black", font=font)
    for left, line, kind in legend:
        top = bottom + 10 + line * LINE
        pen.rectangle([(left, top), (left + 12, top + 12)], fill=colours[kind])
        pen.text((left + 18, top - 2), kind, fill="black", font=font)
    image.save(picture, format="PNG")


def _place(row: str) -> tuple[int, str]:
    """Sort the rows along the way of the data: rollouts, reward service, broker, trainer, weights."""
    order = ("rollout", "reward", "broker", "trainer", "weights")
    kind = re.split(r"[ :]", row, maxsplit=1)[0]
    return (order.index(kind) if kind in order else len(order), row)


def _legend(kinds: Sequence[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[tuple[float, int, str]]:
    """Return where each name stands: pixels from the left, and the line."""
    placed, x, line = [], 8.0, 0
    for kind in kinds:
        width = 18 + font.getlength(kind) + 24
        if x + width > WIDTH and x > 8.0:
            x, line = 8.0, line + 1
        placed.append((x, line, kind))
        x += width
    return placed


def _fitting(label: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """A label that fits into its strip: of a long one the middle is left out."""
    room, kept = LABELS - 16, len(label)
    shown = label
    while font.getlength(shown) > room:
        kept -= 1
        shown = f"{label[: kept - kept // 2]}…{label[-(kept // 2) :]}"
    return shown


def _step(seconds: float) -> float:
    """A round number of seconds of which the picture has about ten."""
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 10 >= seconds)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
