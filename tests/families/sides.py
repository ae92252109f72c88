"""The two halves of a test as processes that answer orders, one JSON object a line: `Orders` is the owner's end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CAUSE = re.compile(r"^(?:\S+ )?\w*(?:Error|Exception|Failure): (.+)$", re.MULTILINE)


class Refused(Exception):
    """What was asked for cannot be done; the text is one line that says why."""

    def __init__(self, why: str, by: str) -> None:
        """`by`: the environment of whoever says so."""
        super().__init__(why)
        self.found = {"refused": why, "by": by}


def answer_orders(answer: Callable[..., Any]) -> None:
    """Answer with what `answer(**order)` returns, or {"error": why}, until the orders end."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for line in sys.stdin:
        try:
            reply = answer(**json.loads(line))
        except Exception as error:
            reply = {"error": f"{error}" or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)


class Orders:
    """A program of this folder, run by a service's environment."""

    def __init__(
        self, program: str, environment: str, log: Path, python: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """`log`: where it says what it does beside its answers; `python`: of the environment."""
        self._log, self._environment = log, environment
        self._begun = 0
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(variables or {})},
        )

    def __call__(self, **order: Any) -> Any:
        """Give an order and return the answer. Raises Refused."""
        self.give(**order)
        return self.answer()

    def give(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._begun = self._log.stat().st_size
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the order given last. Raises Refused."""
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:  # the next answer would be this order's
            self._process.kill()
            self._process.wait()
            raise
        reply = json.loads(line) if line else {"error": "its process ended; see root cause above"}
        if isinstance(reply, dict) and "error" in reply:
            raise Refused(self._cause(reply["error"]), self._environment)
        return reply

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()

    def _cause(self, error: str) -> str:
        """One line; where it says no more than that there is a cause, the last error of the log."""
        with self._log.open(errors="replace") as log:
            log.seek(self._begun)
            causes = _CAUSE.findall(log.read())
        # An engine core that does not start says why in a process of its own.
        own = [cause for cause in causes if "Engine core" not in cause]
        said_elsewhere = "root cause above" in error or "core has ended" in error
        text = own[-1] if own and said_elsewhere else error
        return " ".join(text.split())[:400]
