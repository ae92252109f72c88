"""Processes of the tests, forked from one that has imported what all need, which takes 10 s of CPU each time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

CUDA_QUEUES = "8"
"""In the environment of the server of forks, which importing ColossalAI must not change."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])


def start_server() -> None:
    """Have the server of forks import what it has to, beside this process; again is harmless."""
    given = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_DEVICE_MAX_CONNECTIONS": CUDA_QUEUES}
    with mock.patch.dict(os.environ, given):
        forkserver.ensure_running()


def _enter(errors: str, environment: Mapping[str, str], target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    target(*arguments)


class Forked:
    """A process that runs `target(*arguments)`, a function of a module; `said()` is what it has written to stderr."""

    def __init__(
        self, errors: Path, target: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
    ):
        start_server()
        self._errors = errors
        self.process = FORKS.Process(
            target=_enter, args=(str(errors), dict(environment or {}), target, arguments), daemon=True
        )
        self.process.start()

    def said(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    def poll(self) -> int | None:
        """Its exit status; negative: the signal that killed it; None: it runs."""
        return self.process.exitcode

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"did not end in {seconds:g} s: {self.said()}"
        return self.process.exitcode

    def wait_until_stopped(self, seconds: float = 60.0) -> None:
        """Return when it stands still by a SIGSTOP; a SIGCONT that came before that would be in vain."""
        deadline = time.monotonic() + seconds
        while (status := Path(f"/proc/{self.process.pid}/stat").read_text()).rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"did not stop: {status}"
            time.sleep(0.01)

    def end(self) -> None:
        """Kill it if it runs still."""
        if self.poll() is None:
            self.send(signal.SIGKILL)
        self.wait()
