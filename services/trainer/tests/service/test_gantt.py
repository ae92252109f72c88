"""The trace as a picture: each bar stands where its times say, in the colour of what was done."""

from pathlib import Path

from PIL import Image, ImageColor

from quartet_trainer.records.gantt import (
    EDGE,
    LABELS,
    PALETTE,
    ROW,
    WIDTH,
    Span,
    draw,
    read_spans,
)
from quartet_trainer.records.trace import Trace

SPANS = [
    ("trainer", "waiting_for_batch", 100.0, 2.0),
    ("trainer", "training", 102.0, 6.0),
    ("weights", "version 1", 108.0, 2.0),
]


def test_a_closed_trace_has_its_picture(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for span in SPANS:
        trace.span(*span)
    trace.close()
    trace.close()  # once more changes nothing
    assert read_spans(tmp_path / "trace.json") == [
        Span("trainer", "waiting_for_batch", 0.0, 2.0),
        Span("trainer", "training", 2.0, 6.0),
        Span("weights", "version 1", 8.0, 2.0),
    ]
    with Image.open(tmp_path / "trace.png") as image:
        assert image.size == (WIDTH, EDGE + 2 * ROW + EDGE)

        def colour(row: int, second: float) -> tuple[int, ...]:
            return image.getpixel((LABELS + int(second * (WIDTH - LABELS - EDGE) / 10), EDGE + row * ROW + ROW // 2))

        first, second, third = (ImageColor.getrgb(PALETTE[number]) for number in range(3))
        assert [colour(0, at) for at in (0.1, 1.9, 2.1, 7.9)] == [first, first, second, second]
        assert colour(1, 8.1) == colour(1, 9.9) == third
        nothing = {colour(0, 8.5), colour(1, 7.5)}
        assert not nothing & {first, second, third}


def test_a_trace_without_a_span_and_one_cut_off_by_a_kill_can_be_drawn(tmp_path: Path) -> None:
    Trace(tmp_path / "empty.json").close()
    assert (tmp_path / "empty.png").stat().st_size > 0
    trace = Trace(tmp_path / "killed.json")
    trace.span(*SPANS[0])
    trace.close()
    with (tmp_path / "killed.json").open("a", encoding="utf-8") as file:
        file.write('{"ph": "X", "na')
    draw(tmp_path / "killed.json", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "killed.png").read_bytes()


def test_a_row_whose_bars_overlap_shows_how_many_there_are(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for group, began, seconds in (("a", 100.0, 10.0), ("b", 104.0, 2.0), ("c", 110.0, 10.0)):
        trace.span("reward", "verifying", began, seconds, group=group)
    trace.close()
    with Image.open(tmp_path / "trace.png") as image:
        filled = ImageColor.getrgb(PALETTE[0])

        def height(second: float) -> int:
            """Coloured pixels of the row above a moment."""
            x = LABELS + int(second * (WIDTH - LABELS - EDGE) / 20)
            return sum(image.getpixel((x, y)) == filled for y in range(EDGE, EDGE + ROW))

        assert height(2) == height(8) == height(15)
        assert 1.7 * height(2) < height(5) <= ROW - 7
