"""A process of the reward service that hangs is killed and replaced; its item is judged again, or fails without reward.

SIGSTOP stands for all that takes a process off its work. The items beside it are judged as fast as before.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from quartet.v1 import reward_pb2
from reward_samples import Running, hard, judged, program, serving, until
from sandbox_modes import MODES, below, open_sandbox, settings

from quartet_reward.sandbox import run
from quartet_reward.sandbox.api import ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.workers import pool
from quartet_server import worker_process

DEADLINE_SECONDS = 2.0
CORRECT = reward_pb2.OUTCOME_CORRECT
FUNCTIONS = """
import ctypes, os, pathlib, time
def slow(completion, **columns):
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(0.5)
    return 1.0
def blocks(completion, **columns):
    if completion == "block":
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock
    return 1.0
"""


def repeated() -> float:
    return REGISTRY.get_sample_value("quartet_reward_executions_total", {"ending": "repeated"}) or 0.0


def ended(pool: str, reason: str) -> float:
    return REGISTRY.get_sample_value("quartet_reward_workers_ended_total", {"pool": pool, "reason": reason}) or 0.0


async def score(service: Running, *items: reward_pb2.ScoreItem) -> list[reward_pb2.ScoreResult]:
    return list((await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=60)).results)


def of_function(verifier: str, completion: str = "x") -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        item_id="a", completion=completion, verifiers=[reward_pb2.VerifierSpec(name=verifier, weight=1.0)]
    )


async def test_a_stopped_math_worker_is_replaced_and_the_other_one_judges_meanwhile(caplog):
    async with serving("reward.workers=2", f"reward.deadline_seconds={DEADLINE_SECONDS}") as service:
        await until(lambda: len(service.pool._idle._free) == 2)
        victim = min(service.pool.pids)
        os.kill(victim, signal.SIGSTOP)
        before, began = ended("math", "died"), time.monotonic()

        async def timed(number: int) -> float:
            (result,) = await score(service, hard(number))
            assert result.score.outcome == CORRECT
            return time.monotonic() - began

        seconds = sorted(await asyncio.gather(*map(timed, range(30))))
        assert seconds[28] < DEADLINE_SECONDS <= seconds[29] < 5 * DEADLINE_SECONDS, "only its own item waited"
        await until(lambda: ended("math", "died") == before + 1 and victim not in service.pool.pids, 10)
    (line,) = [line for line in caplog.messages if "tried once more" in line]
    assert "a signal had stopped it, and it was killed after 2 s" in line


@pytest.fixture
def functions(tmp_path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


async def test_a_function_s_process_that_is_stopped_in_a_call_is_no_slow_function(functions):
    name, pid = f"{functions}:slow", functions.with_name("pid")
    async with serving(f'reward.functions=["{name}"]', f"reward.function_seconds={DEADLINE_SECONDS}") as service:
        scoring = asyncio.create_task(score(service, of_function(name)))
        await until(lambda: pid.exists() and pid.read_text() != "")
        os.kill(int(pid.read_text()), signal.SIGSTOP)
        (result,) = await asyncio.wait_for(scoring, 10 * DEADLINE_SECONDS)
        assert result.score.reward == 1.0, result


async def test_a_function_that_blocks_in_c_is_killed_and_fails_and_the_next_is_judged(functions):
    name = f"{functions}:blocks"
    async with serving(f'reward.functions=["{name}"]', f"reward.function_seconds={DEADLINE_SECONDS}") as service:
        (blocked,) = await score(service, of_function(name, "block"))
        assert blocked.failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED and blocked.failure.retryable
        assert "took too long: killed after 2.0 s (reward.function_seconds)" in blocked.failure.message
        (other,) = await score(service, of_function(name))
        assert other.score.reward == 1.0


async def test_a_worker_that_does_not_end_leaves_its_place_to_another(monkeypatch, caplog):
    monkeypatch.setattr(worker_process, "_END_SECONDS", 0.1)
    async with serving(f"reward.deadline_seconds={DEADLINE_SECONDS}") as service:
        await score(service, hard(1))
        (victim,) = service.pool.pids
        with monkeypatch.context() as deaf:
            deaf.setattr(pool.OneTaskWorker, "kill", lambda worker: None)  # as in a driver that does not return
            os.kill(victim, signal.SIGSTOP)
            (result,) = await score(service, hard(2))
        assert result.score.outcome == CORRECT and victim not in service.pool.pids
        os.kill(victim, signal.SIGKILL)
    assert f"worker {victim} does not end although it was killed; another takes its place" in caplog.messages


SQUARE = "import time\ndef square(n):\n    time.sleep(0.3)\n    return n * n\n"
CHECK = "def check(candidate):\n    assert candidate(3) == 9 and candidate(4) == 16"
SLOW = Job("script", b"import time\ntime.sleep(0.5)\nprint(1)", limits=Limits(wall_seconds=DEADLINE_SECONDS))


@pytest_asyncio.fixture(params=MODES)
async def sandbox(request, monkeypatch):
    monkeypatch.setattr(run, "_START_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(run, "_DEATH_SECONDS", DEADLINE_SECONDS)
    try:
        sandbox = await open_sandbox(settings(request.param), only=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()


@pytest.mark.parametrize("running", [True, False])
async def test_a_stopped_fork_server_is_replaced_and_its_programs_run_again(sandbox, running, caplog):
    (server, *_) = below([sandbox.fork_server]) or [sandbox.fork_server]
    if not running:
        os.kill(server, signal.SIGSTOP)
    work = asyncio.create_task(sandbox.run(SLOW))
    if running:
        await until(lambda: len(below([server])) > 0, 20)
        os.kill(server, signal.SIGSTOP)
    before = repeated()
    execution = await asyncio.wait_for(work, 6 * DEADLINE_SECONDS)
    assert (execution.ending, execution.stdout) == (ExitReason.EXITED, b"1\n")
    assert repeated() == before + 1 and "a fork server died and is started again" in caplog.messages


@pytest.mark.parametrize("choose", [min, max])
async def test_a_stopped_program_or_judge_is_no_wrong_answer(sandbox, choose):
    idle = set(below([sandbox.fork_server]))
    tested = program(SQUARE, test_program=CHECK, entry_point="square")
    work = asyncio.create_task(judged(sandbox, tested, timeout_seconds=DEADLINE_SECONDS))
    await until(lambda: len(set(below([sandbox.fork_server])) - idle) >= 2, 20)
    await asyncio.sleep(0.1)  # both have begun: a namespace has its first process before its program
    running = set(below([sandbox.fork_server])) - idle
    os.kill(choose(running), signal.SIGSTOP)
    found = await asyncio.wait_for(work, 20 * DEADLINE_SECONDS)
    assert found.score.outcome == CORRECT, found


async def test_a_stopped_script_is_run_again(sandbox):
    idle = set(below([sandbox.fork_server]))
    work = asyncio.create_task(sandbox.run(SLOW))
    await until(lambda: len(set(below([sandbox.fork_server])) - idle) >= 1, 20)
    os.kill(max(set(below([sandbox.fork_server])) - idle), signal.SIGSTOP)
    execution = await asyncio.wait_for(work, 6 * DEADLINE_SECONDS)
    assert (execution.ending, execution.stdout) == (ExitReason.EXITED, b"1\n")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU])
async def test_a_program_cannot_seem_stopped_from_outside(sandbox, number):
    source = f"import os\ndef square(n):\n    os.kill(os.getpid(), {int(number)})"
    found = await judged(sandbox, program(source, test_program=CHECK, entry_point="square"))
    assert found.score.outcome != CORRECT and not found.HasField("failure"), found
    assert "Operation not permitted" in found.score.reason
