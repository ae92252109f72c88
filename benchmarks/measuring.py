"""Helpers of the benchmarks: pairs measured in turn, services as processes, and the line that each prints.

A benchmark is a program that measures ours and a peer in the same run, so that the machine's load affects both alike,
and prints one line of JSON (`report`).
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quartet_common.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "deploy" / "local"))  # not every environment has the launcher
from quartet_local import guard  # noqa: E402

ENVIRONMENTS = ROOT / ".quartet" / "envs"
GRACE_SECONDS = 5
START_SECONDS = 60.0


@dataclass(frozen=True)
class Figure:
    """One measured pair."""

    name: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    better: Literal["higher", "lower"]


def in_turn(ours: Callable[[], float], peer: Callable[[], float], rounds: int, warm_up: int = 1) -> tuple[float, float]:
    """Measure both `rounds` times in turn, in alternating order, and return the medians."""
    for _ in range(warm_up):
        ours(), peer()
    measured: dict[Callable[[], float], list[float]] = {ours: [], peer: []}
    for index in range(rounds):
        for measure in (ours, peer) if index % 2 == 0 else (peer, ours):
            measured[measure].append(measure())
    return statistics.median(measured[ours]), statistics.median(measured[peer])


def report(*figures: Figure) -> None:
    """Print the benchmark's result, which must be its last line of output."""
    print(json.dumps([asdict(figure) for figure in figures]), flush=True)


@contextlib.contextmanager
def process(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """Run a command that is killed when this program ends, even by SIGKILL. `options` are Popen's."""
    guarded = guard.guarded(command, GRACE_SECONDS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        options = {"stdin": subprocess.DEVNULL, "stdout": file} | options
        running = subprocess.Popen(guarded, env=environment, stderr=file, **options)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGTERM)  # the guard kills at the second one
            running.wait(GRACE_SECONDS)


class Side:
    """A process of a benchmark that reads and writes one JSON object per line. It ends with the stack."""

    def __init__(self, command: list[str], log: Path, stack: contextlib.ExitStack):
        self._log = log
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = stack.enter_context(process(command, log, **pipes))

    def send(self, line: dict) -> None:
        """Write a line to its input."""
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"a side has ended: {self._log.read_text()[-2000:]}") from None

    def receive(self) -> Any:
        """Return the next line of its output. Raises RuntimeError with the end of its log if it has ended."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side has ended: {self._log.read_text()[-2000:]}")
        return json.loads(line)


@contextlib.contextmanager
def service(kind: str, folder: Path, settings: list[str], seconds: float = START_SECONDS) -> Iterator[str]:
    """Run a service of this checkout; yield its address once it serves, within so many seconds.

    `settings`: KEY=VALUE of the run file.

    Raises:
        RuntimeError: it did not come up; the text is the end of its log.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address, log = f"127.0.0.1:{free_port()}", folder / f"{kind}.log"
    settings = [f"addresses.{kind}={address}", f"run.folder={folder / 'run'}", "server.metrics=false", *settings]
    command = [str(ENVIRONMENTS / kind / "bin" / "python"), "-m", f"quartet_{kind}"]
    command += [word for setting in settings for word in ("--set", setting)]
    with process(command, log, cwd=folder), grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise RuntimeError(f"{kind} does not serve ({error.code()}): {log.read_text()[-2000:]}") from error
        yield address


def server_at(kind: str, address: str) -> int:
    """Return the process id of a service that `service` runs. Raises RuntimeError if there is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            named = f"addresses.{kind}={address}".encode() in words
            if words[1:3] == [b"-m", f"quartet_{kind}".encode()] and named:
                return int(folder.name)
    raise RuntimeError(f"no process serves at {address}")


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
