"""Traces: of each group's way through the training, and of this process's phases (`trace.json`)."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quartet.v1 import experience_pb2

from quartet_common import tracing
from quartet_trainer.records.journal import writing

# Steps whose weights were not handed out yet: while there is no rollout there is nothing to tell.
_MOST_STEPS = 64


class GroupTraces:
    """For the loop's thread. Does nothing unless [tracing] is configured."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._trained: deque[tuple[int, list[str]]] = deque(maxlen=_MOST_STEPS)

    @contextmanager
    def step(self, step: int, groups: Sequence[experience_pb2.ExperienceGroup]) -> Iterator[None]:
        """Trace an optimizer step: as a trace of its own that links to its groups, and within the trace of each."""
        if not tracing.enabled():
            yield
            return
        contexts = [group.header.traceparent for group in groups if group.header.traceparent]
        attributes: dict[str, tracing.Value] = {
            "quartet.run": self._run_id,
            "quartet.step": step,
            "quartet.policy_version": step + 1,
            "quartet.groups": len(groups),
        }
        began = time.time()
        with tracing.span("train step", root=True, links=contexts, attributes=attributes) as span:
            yield
        for context in contexts:
            links = [span.traceparent] if span.traceparent else []
            tracing.record("optimizer step", context, began, links=links, kind="consumer", attributes=attributes)
        self._trained.append((step + 1, contexts))

    def published(self, version: int, rollouts: int, elapsed: float) -> None:
        """Trace that rollouts have a version, and with it whatever was trained up to it. `elapsed`: seconds it took."""
        began = time.time() - elapsed
        while self._trained and self._trained[0][0] <= version:
            trained, contexts = self._trained.popleft()
            attributes: dict[str, tracing.Value] = {
                "quartet.run": self._run_id,
                "quartet.policy_version": version,
                "quartet.trained_version": trained,
                "quartet.rollouts": rollouts,
            }
            for context in contexts:
                tracing.record("weights published", context, began, attributes=attributes)


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
