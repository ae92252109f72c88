"""The Gantt trace of a run as a picture: a row for each part, a bar for each thing it did, seconds along the top.

`python -m quartet_trainer.records.gantt trace.json trace.png` draws one again, e.g. of a trainer that was killed.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, LABELS, ROW, EDGE = 1800, 260, 30, 36
"""Pixels: of the picture, of the names at the left, of a row, and of the strips for the scale and the legend."""
PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac")


@dataclass(frozen=True)
class Span:
    """One bar; seconds since the first."""

    row: str
    name: str
    began: float
    seconds: float


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


def draw(trace: Path, picture: Path) -> None:
    """Draw `trace` as the PNG `picture`. A bar has at least one pixel."""
    spans = read_spans(trace)
    rows = list(dict.fromkeys(span.row for span in spans))
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys(span.name for span in spans))}
    end = max((span.began + span.seconds for span in spans), default=1.0) or 1.0
    scale = (WIDTH - LABELS - EDGE) / end
    bottom = EDGE + ROW * len(rows)
    image = Image.new("RGB", (WIDTH, bottom + EDGE), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(13)

    step = _step(end)
    for tick in range(math.floor(end / step) + 1):
        x = LABELS + tick * step * scale
        pen.line([(x, EDGE - 6), (x, bottom)], fill="#dddddd")
        pen.text((x, 8), f"{tick * step:g} s", fill="black", font=font)
    for number, row in enumerate(rows):
        pen.text((8, EDGE + number * ROW + 7), row, fill="black", font=font)
    for span in spans:
        top = EDGE + rows.index(span.row) * ROW + 4
        left = LABELS + span.began * scale
        pen.rectangle([(left, top), (left + max(1.0, span.seconds * scale), top + ROW - 8)], fill=colours[span.name])
    x = 8.0
    for name, colour in colours.items():
        pen.rectangle([(x, bottom + 10), (x + 12, bottom + 22)], fill=colour)
        pen.text((x + 18, bottom + 8), name, fill="black", font=font)
        x += 18 + pen.textlength(name, font=font) + 24
    image.save(picture, format="PNG")


def _step(seconds: float) -> float:
    """A round number of seconds of which the picture has about ten."""
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 10 >= seconds)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
