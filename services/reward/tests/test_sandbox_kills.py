"""Whoever kills a program from outside does not make it a wrong one."""

import asyncio
import contextlib
import math
import os
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program
from sandbox_modes import MODES, below, open_sandbox, settings

from quartet_reward.sandbox.api import ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.sandbox.run import has_threads

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW = Job("script", b"import time\ntime.sleep(0.2)\nprint(1)")
ENDLESS = Job("script", b"import time\ntime.sleep(60)")
POLL_SECONDS = 0.002


@pytest.fixture
def sandbox(any_sandbox: Sandbox) -> Sandbox:
    return any_sandbox


class EndedBefore(Exception):
    """The work had ended before all kills."""


async def under_kills(sandbox: Sandbox, work: Awaitable, kills: float, choose: Callable[[list[int]], int]) -> Any:
    """Kill so many of the sandbox's processes while awaiting the work. Return its result, or what it raised.

    Raises EndedBefore where it had ended before that: a busy machine did not let this process look in time.
    """
    idle = set(below([sandbox.fork_server]))
    task = asyncio.ensure_future(work)
    while kills and not task.done():
        await asyncio.sleep(POLL_SECONDS)
        if running := [pid for pid in below([sandbox.fork_server]) if pid not in idle]:
            victim = choose(running)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills -= 1
            while os.path.exists(f"/proc/{victim}"):
                await asyncio.sleep(POLL_SECONDS)
    if kills not in (0, math.inf):
        raise EndedBefore
    (result,) = await asyncio.gather(task, return_exceptions=True)
    return result


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
async def test_a_process_that_is_reaped_while_it_is_looked_at_has_no_threads(monkeypatch, error):
    handle = os.pidfd_open(os.getpid())

    def reaped(folder: str) -> list[str]:
        assert folder == f"/proc/{os.getpid()}/task"
        raise error

    try:
        assert has_threads(handle)
        monkeypatch.setattr(os, "listdir", reaped)
        assert not has_threads(handle)
    finally:
        os.close(handle)


# With namespaces, the oldest process is the one that only waits, the youngest the program's; else they are the same.
@pytest.mark.parametrize("choose", [min, max])
async def test_what_is_killed_once_is_run_again(sandbox, choose):
    execution = None
    while execution is None:
        with contextlib.suppress(EndedBefore):
            execution = await under_kills(sandbox, sandbox.run(SLOW), 1, choose)
    assert (execution.ending, execution.stdout) == (ExitReason.EXITED, b"1\n")


@pytest.mark.parametrize("choose", [min, max])
async def test_what_is_killed_again_and_again_is_a_failure(sandbox, choose):
    failure = await under_kills(sandbox, sandbox.run(ENDLESS), math.inf, choose)
    assert isinstance(failure, SandboxUnavailable), failure
    assert (await sandbox.run(SLOW)).stdout == b"1\n"


async def test_what_the_kernel_kills_at_a_limit_is_not_run_again():
    sandbox = await open_sandbox(settings(MODES[0]), only=MODES[0])
    try:
        deaf = b"import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nprint(1, flush=True)\nwhile True: pass"
        execution = await sandbox.run(Job("script", deaf, limits=Limits(cpu_seconds=1, processes=1)))
        assert (execution.ending, execution.stdout) == (ExitReason.TIMED_OUT, b"1\n")
    finally:
        await sandbox.close()


SQUARE = "import time\ndef square(n):\n    time.sleep(0.02)\n    return n * n\n"
CHECK = "def check(candidate):\n    assert candidate(3) == 9 and candidate(4) == 16"
HONEST = (
    program(SQUARE, test_program=CHECK, entry_point="square"),
    program(SQUARE, test_program="import math\nassert math.isclose(square(2), 4)"),
    program(SQUARE, [("[3]", "9")] * 2, entry_point="square"),
    program(SQUARE + "print(square(int(input())))", [("3", "9")] * 2),
)


async def test_no_honest_program_is_wrong_because_something_was_killed(sandbox):
    rng = random.Random(4)
    work = asyncio.gather(*(judged(sandbox, each, timeout_seconds=30.0) for each in HONEST * 6))
    for found in await under_kills(sandbox, work, 16, rng.choice):
        if found.HasField("failure"):
            assert found.failure.kind == reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE, found
        else:
            assert found.score.outcome == reward_pb2.OUTCOME_CORRECT, found
    for each in HONEST:
        assert (await judged(sandbox, each)).score.outcome == reward_pb2.OUTCOME_CORRECT


@pytest.mark.parametrize(
    "body",
    [
        "os.kill(os.getpid(), 9)",
        "os.close(3)\n    time.sleep(60)",
        "threading.Thread(target=later).start()\n    ctypes.CDLL(None).syscall(EXIT, 0)",
    ],
)
async def test_a_program_cannot_seem_killed_from_outside(sandbox, body):
    source = (
        "import ctypes, os, platform, threading, time\nEXIT = {'x86_64': 60, 'aarch64': 93}[platform.machine()]\n"
        f"def later():\n    time.sleep(0.05)\n    os.close(3)\n    time.sleep(60)\ndef square(n):\n    {body}"
    )
    found = await judged(sandbox, program(source, test_program=CHECK, entry_point="square"), timeout_seconds=2.0)
    assert found.score.outcome in (reward_pb2.OUTCOME_RUNTIME_ERROR, reward_pb2.OUTCOME_TIMED_OUT), found
