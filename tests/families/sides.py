"""The two halves of a test as processes that answer requests, one JSON object per line; `Orders` is the test's end."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "preloaded"))
from started import Answering  # noqa: E402 (beside the other suites' tests)

_CAUSE = re.compile(r"^(?:\S+ )?\w*(?:Error|Exception|Failure): (.+)$", re.MULTILINE)


class Refused(Exception):
    """A request failed; the text is the reason, in one line."""

    def __init__(self, why: str, by: str) -> None:
        """`by`: the environment that reported it."""
        super().__init__(why)
        self.found = {"refused": why, "by": by}


def answer_orders(answer: Callable[..., Any]) -> None:
    """Answer each request with the result of `answer(**order)` or {"error": reason}, until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    for line in sys.stdin:
        try:
            reply = answer(**json.loads(line))
        except Exception as error:
            reply = {"error": f"{error}" or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)


class Orders(Answering):
    """A program of this folder, run in a service's environment."""

    def __init__(
        self, program: str, environment: str, log: Path, python: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """`log`: file for its other output; `python`: of the environment."""
        self._environment, self._asked_at = environment, 0
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(variables or {})}
        super().__init__([python, Path(__file__).with_name(program)], log, env={**os.environ, **own})

    def __call__(self, **order: Any) -> Any:
        """Send a request and return the answer. Raises Refused."""
        self.give(**order)
        return self.answer()

    def give(self, **order: Any) -> None:
        self._asked_at = self.log.stat().st_size
        super().give(**order)

    def answer(self) -> Any:
        """Return the answer to the last request. Raises Refused."""
        try:
            line = self.stdout.readline()
        except BaseException:  # otherwise the next request would get this answer
            self.close()
            raise
        reply = json.loads(line) if line else {"error": "its process ended; see root cause above"}
        if isinstance(reply, dict) and "error" in reply:
            raise Refused(self._cause(reply["error"]), self._environment)
        return reply

    @property
    def ended(self) -> bool:
        return self.poll() is not None

    def _cause(self, error: str) -> str:
        """Return an error in one line, or the log's last error if the error only refers to another one."""
        with self.log.open(errors="replace") as log:
            log.seek(self._asked_at)
            causes = _CAUSE.findall(log.read())
        # An engine core that fails to start logs the reason in its own process.
        own = [cause for cause in causes if "Engine core" not in cause]
        said_elsewhere = "root cause above" in error or "core has ended" in error
        text = own[-1] if own and said_elsewhere else error
        return " ".join(text.split())[:400]
