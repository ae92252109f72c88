"""Commands that tests start: each in its own session, with output to a log, killed with its descendants."""

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
    """A running command. `options` are Popen's."""

    def __init__(self, command: list, log: Path, **options: object):
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0  # the end of an earlier command's output
        with log.open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            super().__init__(command, **{**streams, "start_new_session": True, **options})

    def said(self) -> str:
        """Return its output so far."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def must_run(self) -> None:
        """Raise AssertionError with the end of its output if it has exited."""
        assert self.poll() is None, f"{self.log.stem} ended with {self.returncode}: {self.said()[-LAST_WORDS:]}"

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        """Poll until a condition holds. Raises AssertionError after `seconds`, or if the command exits."""
        deadline = time.monotonic() + seconds
        while not condition():
            words = self.said()[-LAST_WORDS:]
            assert time.monotonic() < deadline, f"{self.log.stem}: {what} within {seconds:.0f} s? {words}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.1)
            self.must_run()

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        os.killpg(process_of(self.pid), number)

    def close(self) -> None:
        """Kill it and its process group, which may have exited already."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10)


class Answering(Started):
    """A program with requests on standard input and responses on standard output, one JSON object per line."""

    def __init__(self, command: list, log: Path, **options: object):
        with log.open("ab") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            super().__init__(command, log, **pipes, **options)

    def give(self, **order: object) -> None:
        """Send a request."""
        self.stdin.write(json.dumps(order) + "\n")
        self.stdin.flush()

    def hear(self):
        """Return its next response. Raises AssertionError with the end of its output if it has exited."""
        line = self.stdout.readline()
        assert line, f"{self.log.stem} ended: {self.said()[-LAST_WORDS:]}"
        return json.loads(line)

    def order(self, **order: object):
        """Send a request; return the response."""
        self.give(**order)
        return self.hear()


REDIS_ANSWERS = "Ready to accept connections"


def redis_command(port: int, folder: Path, kept: bool = False, host: str = "127.0.0.1", **more: object) -> list[str]:
    """Return the command of a Redis; `kept`: its data is stored in the folder and survives a restart."""
    from quartet_local.process import find_server  # released programs that import this module lack it

    options = {"bind": host, "port": port, "dir": folder, "save": "", "appendonly": "yes" if kept else "no", **more}
    return [find_server(), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]


def write_run_file(path: Path, sections: Mapping[str, Mapping[str, object]]) -> Path:
    """Write TOML; strings, numbers and booleans are written as JSON, which is the same."""
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join([*lines, ""]))
    return path


def write_demo_run(folder: Path, run_id: str, **sections: Mapping[str, object]) -> Path:
    """Write run.toml, with free ports, and train.jsonl for a run of the demo's model in `folder`/model.

    `sections` are further keys, e.g. run={"max_steps": 3}.
    """
    from quartet_common.ports import free_ports

    rows = ({"prompt": f"1+{number}=?", "gt_answer": str(1 + number)} for number in range(8))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ports = zip(("broker", "reward", "rollout", "trainer"), free_ports(4, neighbor=100), strict=True)
    tree: dict[str, dict[str, object]] = {
        "run": {
            "id": run_id,
            "folder": str(folder / "run"),
            "group_size": 2,
            "groups_per_step": 2,
            "max_queued_prompts": 64,  # 4096 would cost a run of a few steps a seventh of its CPU time
        },
        "run.sampling": {"max_new_tokens": 8},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "passes": 0},
        "addresses": {name: f"127.0.0.1:{port}" for name, port in ports},
        "rollout": {"engine": "transformers"},
    }
    return write_run_file(
        folder / "run.toml", tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()}
    )
