"""The sandbox beside the least that an execution can cost, and beside bubblewrap.

- The limit: a warm interpreter with the same modules that forks, runs the same program in the child with output to a
  pipe, and waits, without isolation. Compared by CPU time of all processes, including the service's.
- The peer: `bwrap` with the same namespaces around `python -I -S`, the usual way to sandbox a program. Compared by
  executions per second on all cores and by latency under load. Without bubblewrap (`apt-get install bubblewrap`) the
  benchmark fails.
- A program that never ends: the time from its limit until it is killed, against the 100 ms allowed.
"""

import asyncio
import gc
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import time

from measuring import Figure, in_turn, report

from quartet_reward.config import SandboxSection
from quartet_reward.sandbox.api import Job, Limits
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.sandbox.server_handle import PRELOAD

PROGRAM = b"print(1)"
CORES = os.cpu_count() or 1
EXECUTIONS = 150
ROUNDS = 5
TICKS = os.sysconf("SC_CLK_TCK")
KILLED_AFTER = 0.3
ALLOWED_SECONDS = 0.1
CONCURRENT = (2, 16, 128)


def main() -> None:
    if len(sys.argv) > 1:
        return fork_bare(int(sys.argv[1]))
    if shutil.which("bwrap") is None:
        sys.exit("bubblewrap is not installed, and it is the peer: apt-get install bubblewrap")
    with asyncio.Runner() as runner:
        sandbox = Sandbox(SandboxSection(slots=max(4, 2 * CORES)))
        runner.run(sandbox.start())
        try:
            report(
                cpu(runner, sandbox),
                rate(runner, sandbox),
                lateness(runner, sandbox),
                *(figure for count in CONCURRENT for figure in latency(runner, sandbox, count)),
            )
        finally:
            runner.run(sandbox.close())


def cpu(runner: asyncio.Runner, sandbox: Sandbox) -> Figure:
    """CPU milliseconds of an execution, one after the other."""

    async def executions() -> None:
        for _ in range(EXECUTIONS):
            assert (await sandbox.run(Job("script", PROGRAM))).stdout == b"1\n"

    def ours() -> float:
        before = cpu_of_family()
        runner.run(executions())
        return (cpu_of_family() - before) / EXECUTIONS * 1e3

    def bare() -> float:
        command = [sys.executable, __file__, str(EXECUTIONS)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    measured, limit = in_turn(ours, bare, ROUNDS)
    return Figure(f"sandbox: CPU of an execution, {sandbox.mode}", "ms", measured, limit, "bare fork", "lower")


def fork_bare(count: int) -> None:
    """Run the limit: print the CPU milliseconds per execution of `count` executions."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    before = sum(os.times()[:4])
    for _ in range(count):
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writable, 1)
            exec(compile(PROGRAM, "program.py", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        os.close(writable)
        os.read(readable, 65536)
        os.close(readable)
        os.waitpid(pid, 0)
    print((sum(os.times()[:4]) - before) / count * 1e3)


def cpu_of_family() -> float:
    """CPU seconds of this process, its children that live, theirs, and all that these have waited for."""
    waiting, seconds = [os.getpid()], 0.0
    while waiting:
        pid = waiting.pop()
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        # Not what this process has waited for: peers that have run before.
        seconds += sum(map(int, fields[11 : 13 if pid == os.getpid() else 15])) / TICKS
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            waiting += map(int, file.read().split())
    return seconds


async def run_peer() -> None:
    """One execution by bubblewrap."""
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--ro-bind", "/", "/"]
    options += ["--tmpfs", "/tmp", "--dev", "/dev", "--cap-drop", "ALL"]
    python = os.path.realpath(sys.executable)
    process = await asyncio.create_subprocess_exec(
        "bwrap", *options, python, "-I", "-S", "-c", PROGRAM.decode(), stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output == b"1\n", output


async def seconds_each(one, total: int, concurrent: int) -> tuple[float, list[float]]:
    """Run `one` `total` times, `concurrent` at a time; return the wall seconds of all, and of each."""
    gate, each = asyncio.Semaphore(concurrent), []

    async def timed() -> None:
        async with gate:
            began = time.perf_counter()
            await one()
            each.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(timed() for _ in range(total)))
    return time.perf_counter() - began, each


def rate(runner: asyncio.Runner, sandbox: Sandbox) -> Figure:
    """Executions a second, as many at a time as there are cores."""

    def ours() -> float:
        wall, _ = runner.run(seconds_each(lambda: sandbox.run(Job("script", PROGRAM)), 200, 2 * CORES))
        return 200 / wall

    def peer() -> float:
        wall, _ = runner.run(seconds_each(run_peer, 60, CORES))
        return 60 / wall

    measured, theirs = in_turn(ours, peer, ROUNDS)
    return Figure("sandbox: executions", "/s", measured, theirs, "bubblewrap + python -I -S", "higher")


def lateness(runner: asyncio.Runner, sandbox: Sandbox) -> Figure:
    """Milliseconds from the limit of a program that never ends to its execution's answer, at worst."""
    job = Job("script", b"while True: pass", limits=Limits(wall_seconds=KILLED_AFTER))
    late = []
    for _ in range(8):
        wall, _ = runner.run(seconds_each(lambda: sandbox.run(job), CORES, CORES))
        late.append(wall - KILLED_AFTER)
    name = f"sandbox: worst time from the limit to the end, {CORES} loops at a time"
    return Figure(name, "ms", max(late) * 1e3, ALLOWED_SECONDS * 1e3, "allowed", "lower")


def latency(runner: asyncio.Runner, sandbox: Sandbox, concurrent: int) -> list[Figure]:
    """p50 and p99 of callers' waits, queueing included, `concurrent` at a time."""
    total = max(100, 2 * concurrent)
    _, ours = runner.run(seconds_each(lambda: sandbox.run(Job("script", PROGRAM)), total, concurrent))
    _, theirs = runner.run(seconds_each(run_peer, total, concurrent))
    figures = []
    for name, percent in (("p50", 50), ("p99", 99)):
        mine, peers = (statistics.quantiles(each, n=100, method="inclusive")[percent - 1] for each in (ours, theirs))
        title = f"sandbox: {name} at {concurrent} concurrent"
        figures.append(Figure(title, "ms", mine * 1e3, peers * 1e3, "bubblewrap + python -I -S", "lower"))
    return figures


if __name__ == "__main__":
    main()
