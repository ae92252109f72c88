"""What the trainer did, in Chrome's trace format, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

`trace.json` is an array of events, one a line, without its closing bracket: both readers take it so, and a killed
trainer leaves a file that can be read.
"""

import json
import threading
import time
from pathlib import Path

from quartet_trainer.records.disk import writing


class Trace:
    """Rows of spans; thread-safe. A row is named by what does something: "trainer", "weights", "rollout NAME"."""

    def __init__(self, path: Path):
        """Begin a new file; one of an earlier process is kept as `trace-N.json`."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                earlier = len(list(path.parent.glob(f"{path.stem}-*.json")))
                path.rename(path.with_name(f"{path.stem}-{earlier}.json"))
            self._file = path.open("w", encoding="utf-8", buffering=1)
        self._path = path
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        # Spans are measured by the monotonic clock and shown by the wall's.
        self._offset = time.time() - time.perf_counter()
        self._write("[\n")

    def span(self, row: str, name: str, began: float, seconds: float) -> None:
        """`name` was done for `seconds` from `began` (time.perf_counter) on; spans of a row do not overlap."""
        with self._lock:
            if self._file.closed:
                return
            if row not in self._rows:
                self._rows[row] = len(self._rows)
                named = {"ph": "M", "name": "thread_name", "pid": 1, "tid": self._rows[row], "args": {"name": row}}
                self._write(json.dumps(named) + ",\n")
            times = {"ts": round((began + self._offset) * 1e6), "dur": round(seconds * 1e6)}
            self._write(json.dumps({"ph": "X", "name": name, "pid": 1, "tid": self._rows[row], **times}) + ",\n")

    def _write(self, text: str) -> None:
        with writing(self._path):
            self._file.write(text)

    def close(self) -> None:
        """Close the file; later spans are not written."""
        with self._lock:
            self._file.close()
