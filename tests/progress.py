"""Progress of a run of several suites: a line for each event, and every minute the running suites."""

import threading
import time
from dataclasses import dataclass, field

INTERVAL_SECONDS = 60.0  # between lines with the running suites


@dataclass
class Running:
    """A running suite."""

    name: str
    started: float = field(default_factory=time.monotonic)
    tests: int = 0
    ended: int = 0
    test: str = ""

    def __str__(self) -> str:
        tests = f" {self.ended}/{self.tests}" if self.tests else ""
        return f"{self.name}{tests} {time.monotonic() - self.started:.0f} s {self.test.rpartition('/')[2]}".rstrip()


class Progress:
    """Prints lines of several threads."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._running: list[Running] = []
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Progress":
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ticker.join()

    def start(self, name: str) -> Running:
        running = Running(name)
        self._running.append(running)
        self.say(f"{name} starts")
        return running

    def end(self, running: Running) -> None:
        self._running.remove(running)

    def say(self, text: str) -> None:
        """Print a line with the elapsed time."""
        elapsed = int(time.monotonic() - self._began)
        with self._lock:
            print(f"[{elapsed // 60:3}:{elapsed % 60:02}] {text}", flush=True)

    def _tick(self) -> None:
        while not self._over.wait(INTERVAL_SECONDS):
            self.say(f"running: {' | '.join(map(str, self._running))}")
