"""A run's metrics.jsonl, read as it grows: what was before the page was opened, and what is left without a broker."""

import json
import logging
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)
_MAX_READ = 16 << 20  # bytes at one go: the page must not stop for a long run's file


class MetricsFile:
    """Follows a metrics.jsonl (docs/metrics.md), which its trainer may cut and write again from a checkpoint on.

    Attributes:
        problem: why it cannot be read, in a sentence; empty while it can, or while there is none.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem = ""
        self._position = 0
        self._last_line = b""  # the bytes before `_position`: others there mean that the file was written again

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file began anew since the last call, and its new rows, at most 16 MiB of them."""
        try:
            with self.path.open("rb") as file:
                anew = self._was_cut(file)
                if anew:
                    self._position, self._last_line = 0, b""
                file.seek(self._position)
                fresh = file.read(_MAX_READ)
        except FileNotFoundError:
            anew, fresh = self._position > 0, b""
            self._position, self._last_line, self.problem = 0, b"", ""
            return anew, []
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror}"
            return False, []
        self.problem = ""
        whole = fresh[: fresh.rfind(b"\n") + 1]  # the last line may be half written
        if whole:
            self._position += len(whole)
            self._last_line = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        rows = [row for row in (self._row(line) for line in whole.splitlines()) if row is not None]
        return anew, rows

    def _was_cut(self, file) -> bool:
        file.seek(self._position - len(self._last_line))
        return file.read(len(self._last_line)) != self._last_line

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except ValueError as error:
            self.problem = f"{self.path} has a line that is no JSON: {error}"
            return None
        return row if isinstance(row, dict) else None
