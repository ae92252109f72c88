"""A process that faults are injected into. It runs under the guard; its output is logged, and its events are read."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from quartet_local import guard

sys.path.append(str(Path(__file__).resolve().parents[1] / "preloaded"))
from preloaded import process_of  # noqa: E402 (beside the other suites' tests)

GRACE_SECONDS = 3.0
CHILD_SECONDS = 60.0  # for the guard to start its command
_SERVING = ("serving at", "Ready to accept connections")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class Victim:
    """A command that is restarted after each fault.

    Args:
        name: "broker-a"; the part before the dash is its kind.
        command: with its arguments.
        log: file that its output is appended to.
        heard: called with the victim and each event of a stand-in.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, heard: Callable[["Victim", Mapping[str, Any]], None]
    ):
        self.name = name
        self.kind = name.partition("-")[0]
        self.log = log
        self.command = list(command)
        self.starts = 0
        self.ready = asyncio.Event()  # it is ready: a fault now has an effect
        self.allowed = asyncio.Event()  # it may be started
        self.allowed.set()
        self.killed = False  # by the harness, since the current start
        self.paused = False
        self.last_line = ""
        self._heard = heard
        self._guard: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task | None = None

    async def start(self) -> None:
        self.starts += 1
        self.killed, self.paused, self.last_line = False, False, ""
        self._guard = await asyncio.create_subprocess_exec(
            *guard.guarded(self.command, GRACE_SECONDS),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
        self._reading = asyncio.create_task(self._read(self._guard.stdout))

    async def wait(self) -> int:
        """Wait for the current process to exit; return its status (128 + n: killed by signal n)."""
        assert self._guard is not None and self._reading is not None
        status = await self._guard.wait()
        self.ready.clear()
        await self._reading
        return status

    @property
    def running(self) -> bool:
        """True between start and exit."""
        return self._guard is not None and self._guard.returncode is None

    async def process(self) -> psutil.Process:
        """Return the process, which is the guard's first child. Raises psutil.NoSuchProcess if it has exited."""
        assert self._guard is not None
        async with asyncio.timeout(CHILD_SECONDS):
            while True:
                children = psutil.Process(self._guard.pid).children()
                if children:
                    return psutil.Process(
                        process_of(min(children, key=lambda child: (child.create_time(), child.pid)).pid)
                    )
                await asyncio.sleep(0.01)

    async def end_with(self, number: signal.Signals) -> None:
        """Send a signal that ends the process; the guard then kills its descendants."""
        self.killed = True
        self.ready.clear()
        (await self.process()).send_signal(number)

    async def pause(self) -> psutil.Process:
        """Stop the process by SIGSTOP; return it, for `resume`."""
        process = await self.process()
        self.paused = True
        process.suspend()
        return process

    async def end(self) -> None:
        """Stop it with its descendants and do not restart it: SIGTERM, after the grace SIGKILL."""
        self.allowed.clear()
        self.killed = True
        for _ in range(2):  # the guard kills at the second one
            if self.running:
                self._guard.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._guard.wait(), GRACE_SECONDS)

    async def _read(self, output: asyncio.StreamReader | None) -> None:
        assert output is not None
        with self.log.open("ab") as log:
            while line := await output.readline():
                log.write(line)
                log.flush()
                self._take(line.decode(errors="replace").strip())

    def _take(self, line: str) -> None:
        self.last_line = line or self.last_line
        if line.startswith('{"event"'):
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready.set()
            self._heard(self, event)
        elif any(words in line for words in _SERVING):
            self.ready.set()


def _environment() -> dict[str, str]:
    """Return the environment without proxies, which cannot be reached from the namespaces, and without PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key.lower() not in _PROXIES}
    environment.pop("PYTHONPATH", None)
    return {**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
