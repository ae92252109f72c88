"""A Gantt trace of a run in Chrome's trace format, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

`trace.json` is an array of events, one a line, without its closing bracket: both readers take it so, and a killed
trainer leaves a file that can be read. All times are by the trainer's clock, also those of the other services.
"""

import json
import threading
import time
from pathlib import Path

from quartet_trainer.records.disk import writing
from quartet_trainer.records.gantt import draw

# Times are written in microseconds: what ends and begins at the same moment may differ by rounding.
_SAME_SECONDS = 2e-6


class Trace:
    """Rows of spans; thread-safe. A row is named by what does something: "trainer", "weights", "rollout NAME".

    Spans of a row that overlap stand below each other, as threads of the same name: a thread's must not overlap.
    """

    def __init__(self, path: Path):
        """Begin a new file; one of an earlier life is kept as `trace-N.json`."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                earlier = len(list(path.parent.glob(f"{path.stem}-*.json")))
                path.rename(path.with_name(f"{path.stem}-{earlier}.json"))
            self._file = path.open("w", encoding="utf-8", buffering=1)
        self._path = path
        self._rows: dict[str, dict[int, float]] = {}
        """Of each row the threads, and when the last span of each ends."""
        self._threads = 0
        self._lock = threading.Lock()
        # Spans are measured by the monotonic clock and shown by the wall's.
        self._offset = time.time() - time.perf_counter()
        self._write("[\n")

    def span(self, row: str, name: str, began: float, seconds: float, **about: str | int) -> None:
        """Something called `name` was done for `seconds` from `began` (time.perf_counter) on.

        `about`: what it was done to, shown beside it.
        """
        with self._lock:
            if self._file.closed:
                return
            event: dict[str, object] = {
                "ph": "X",
                "name": name,
                "pid": 1,
                "tid": self._thread(row, began, began + seconds),
                "ts": round((began + self._offset) * 1e6),
                "dur": round(seconds * 1e6),
            }
            if about:
                event["args"] = about
            self._write(json.dumps(event) + ",\n")

    def _thread(self, row: str, began: float, ended: float) -> int:
        """Return a thread of the row that is free since `began`."""
        threads = self._rows.setdefault(row, {})
        number = next((each for each, end in threads.items() if end <= began + _SAME_SECONDS), None)
        if number is None:
            number, self._threads = self._threads, self._threads + 1
            named = {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": row}}
            self._write(json.dumps(named) + ",\n")
        threads[number] = ended
        return number

    def _write(self, text: str) -> None:
        with writing(self._path):
            self._file.write(text)

    def close(self) -> None:
        """Close the file and draw it as a picture beside it; later spans are not written."""
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        with writing(self._path.with_suffix(".png")):
            draw(self._path, self._path.with_suffix(".png"))
