"""Handle of a process that has an engine, and of the engine's own processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from harness import PATIENCE


class Owner:
    """The process of engine_owner.py."""

    def __init__(self, engine: str, folder: Path, **options: Any) -> None:
        script = str(Path(__file__).with_name("engine_owner.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, engine, json.dumps(options), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes = [psutil.Process(pid) for pid in self._hear()["processes"]]
        self.processes = [
            process for process in self.processes if "resource_tracker" not in " ".join(process.cmdline())
        ]

    def order(self, **order: Any) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for process in self.processes:
            if process.is_running():
                process.kill()

    def _hear(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())
