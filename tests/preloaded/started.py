"""Commands that tests start: each in a session of its own, its output in a log, killed with all that it started."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from preloaded import process_of

START_SECONDS = 300.0
LAST_WORDS = 3000  # characters


class Started(subprocess.Popen):
    """A command that runs. `options` are Popen's."""

    def __init__(self, command: list, log: Path, **options: object):
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0  # where one before it ended
        with log.open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            super().__init__(command, **{**streams, "start_new_session": True, **options})

    def said(self) -> str:
        """Return what it has said so far."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def must_run(self) -> None:
        """Raise AssertionError with its last words if it has ended."""
        assert self.poll() is None, f"{self.log.stem} ended with {self.returncode}: {self.said()[-LAST_WORDS:]}"

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        """Look again and again until a condition holds. Raises AssertionError if that takes too long, or it ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            words = self.said()[-LAST_WORDS:]
            assert time.monotonic() < deadline, f"{self.log.stem}: {what} within {seconds:.0f} s? {words}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.1)  # the pause between two looks; its end would end it
            self.must_run()

    def signal(self, number: int) -> None:
        """Send it a signal, and all it started."""
        os.killpg(process_of(self.pid), number)

    def close(self) -> None:
        """Kill it with all it started."""
        # It may have ended by itself, and so all of its group.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10)


class Answering(Started):
    """A program that answers orders, one JSON object a line each."""

    def __init__(self, command: list, log: Path, **options: object):
        with log.open("ab") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            super().__init__(command, log, **pipes, **options)

    def give(self, **order: object) -> None:
        """Give an order."""
        self.stdin.write(json.dumps(order) + "\n")
        self.stdin.flush()

    def hear(self):
        """Return its next answer. Raises AssertionError with its last words if it has ended."""
        line = self.stdout.readline()
        assert line, f"{self.log.stem} ended: {self.said()[-LAST_WORDS:]}"
        return json.loads(line)

    def order(self, **order: object):
        """Give an order; return the answer."""
        self.give(**order)
        return self.hear()


REDIS_ANSWERS = "Ready to accept connections"


def redis_command(port: int, folder: Path, kept: bool = False, host: str = "127.0.0.1", **more: object) -> list[str]:
    """What starts a Redis; `kept`: what it holds is in the folder, and is there again when it starts again."""
    from quartet_local.process import find_server  # not of the programs of a release

    options = {"bind": host, "port": port, "dir": folder, "save": "", "appendonly": "yes" if kept else "no", **more}
    return [find_server(), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]


def write_run_file(path: Path, sections: Mapping[str, Mapping[str, object]]) -> Path:
    """Write TOML: text, numbers and truth values look the same in JSON."""
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join([*lines, ""]))
    return path
