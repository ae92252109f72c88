"""What every mode of the sandbox promises to its callers. Attacks are in tests/hostile."""

import asyncio
import os
import resource
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program, until
from sandbox_modes import MODES, below, interpreter, open_sandbox, own_processes, settings

from quartet_reward.config import Mode, SandboxSection
from quartet_reward.errors import ShuttingDown
from quartet_reward.sandbox import server_handle
from quartet_reward.sandbox.api import Execution, ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.sandbox.server_handle import take_users

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_seconds=20.0)
FIRST = 71_000  # a user


@pytest.fixture
def sandbox(any_sandbox: Sandbox) -> Sandbox:
    return any_sandbox


async def run(sandbox: Sandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Execution:
    return await sandbox.run(Job("script", source.encode(), stdin, limits))


async def test_a_program_reads_writes_and_exits(sandbox):
    source = "import sys\nprint(sys.stdin.read().upper())\nprint('oh', file=sys.stderr)\nsys.exit(7)"
    execution = await run(sandbox, source, b"hello")
    assert (execution.ending, execution.exit_code, execution.signal) == (ExitReason.EXITED, 7, None)
    assert (execution.stdout, execution.stderr, execution.report) == (b"HELLO\n", b"oh\n", b"")
    assert 0 < execution.cpu_seconds < 2


async def test_a_program_starts_afresh(sandbox):
    source = (
        "import random, sys\nprint([name in sys.modules for name in ('quartet_reward.code.candidate', 'solution')])\n"
        "print(repr(sys.stdin.read()))\nprint(random.random())"
    )
    (*first, one), (*second, other) = [(await run(sandbox, source)).stdout.splitlines() for _ in range(2)]
    assert first == second == [b"[True, False]", b"''"] and one != other


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ("1/0", 1, b"ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no')", 1, b"no\n"),
        ("import atexit, sys; atexit.register(print, 'late', file=sys.stderr)", 0, b"late\n"),
        ("import threading, time, sys\nt = lambda: (time.sleep(.1), print('thread', file=sys.stderr))\n"
         "threading.Thread(target=t).start()", 0, b"thread\n"),
    ],
)  # fmt: skip
async def test_a_program_ends_as_python_ends_it(sandbox, source, status, says):
    execution = await run(sandbox, source)
    assert (execution.ending, execution.exit_code) == (ExitReason.EXITED, status), execution
    assert says in execution.stderr
    assert b"quartet_reward" not in execution.stderr


@pytest.mark.parametrize("source", ["while True: pass", "import os\nos.fork()\nwhile True: pass"])
async def test_the_limit_of_processor_time_holds(sandbox, source):  # tests/hostile tries the others
    execution = await run(sandbox, source, limits=Limits(wall_seconds=20, cpu_seconds=1))
    assert execution.ending is ExitReason.TIMED_OUT and execution.wall_seconds < 20, execution


JUDGE = "import os, socket\ns = socket.socket(fileno=3)\n"


@pytest.mark.parametrize(
    ("judge", "candidate", "report", "printed", "ending"),
    [
        ("s.send(b'ask')\nos.write(4, s.recv(99))", "s.send(s.recv(99) * 2)\nimport time\ntime.sleep(60)", b"askask",
         b"", ExitReason.SIGNALLED),
        ("s.recv(1)", "try: os.write(4, b'forged')\nexcept OSError: print('none')", b"", b"none\n", ExitReason.EXITED),
        ("os.write(4, b'end' if not s.recv(9) else b'')", "os._exit(0)", b"end", b"", ExitReason.EXITED),
    ],
    ids=["one socket between them", "the report is the judge's", "the judge hears of the end"],
)  # fmt: skip
async def test_a_judge_and_a_candidate(sandbox, judge, candidate, report, printed, ending):
    jobs = [Job("script", (JUDGE + each).encode(), reports=each is judge) for each in (judge, candidate)]
    judging, answered = await sandbox.run_judged(*jobs)
    assert (judging.ending, judging.report) == (ExitReason.EXITED, report)
    assert (answered.ending, answered.stdout, answered.report) == (ending, printed, b"")


async def test_a_cancelled_run_is_killed_and_its_slots_are_free_again(sandbox):
    endless = Job("script", b"while True: pass", limits=Limits(wall_seconds=60))
    tasks = [asyncio.create_task(sandbox.run(endless)) for _ in range(6)]  # two of them wait for a slot
    tasks.append(asyncio.create_task(sandbox.run_judged(endless, endless)))
    await until(lambda: sandbox.waiting == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(15):
        executions = await asyncio.gather(*(run(sandbox, "print(1)") for _ in range(8)))
    assert {execution.stdout for execution in executions} == {b"1\n"}


async def test_many_run_at_a_time_and_neither_one_nor_a_descriptor_is_lost(sandbox):
    await asyncio.gather(*(run(sandbox, "print(1)") for _ in range(10)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        executions = await asyncio.gather(*(run(sandbox, f"print({number})") for number in range(40)))
        assert [int(execution.stdout) for execution in executions] == list(range(40))
    assert len(os.listdir("/proc/self/fd")) <= before


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open at most `count` more file descriptors."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_program_is_killed_at_its_time_by_a_service_that_is_out_of_descriptors(sandbox):
    idle = set(below([sandbox.fork_server]))
    task = asyncio.create_task(run(sandbox, "import time; time.sleep(60)", limits=Limits(wall_seconds=2.0)))
    await until(lambda: set(below([sandbox.fork_server])) - idle)
    await asyncio.sleep(0.5)  # the service has the program's handles
    with descriptors_left(0):
        async with asyncio.timeout(15):
            assert (await task).ending is ExitReason.TIMED_OUT


async def test_what_cannot_start_for_want_of_descriptors_fails_and_leaves_none_open(sandbox):
    before = os.listdir("/proc/self/fd")
    for count in range(7):  # three pipes and the program's source
        with descriptors_left(count), pytest.raises(SandboxUnavailable, match="Too many open files"):
            await run(sandbox, "print(1)")
    assert os.listdir("/proc/self/fd") == before


async def test_a_service_with_a_low_limit_of_descriptors_has_enough_for_all_slots():
    with descriptors_left(64):
        sandbox = await open_sandbox(settings(MODES[0], slots=48), only=MODES[0])
        try:
            executions = await asyncio.gather(*(run(sandbox, "import time; time.sleep(2)") for _ in range(48)))
            assert {execution.ending for execution in executions} == {ExitReason.EXITED}
        finally:
            await sandbox.close()


async def test_a_dead_fork_server_is_started_again_and_runs_its_programs_again(sandbox):
    tasks = [asyncio.create_task(run(sandbox, "import time; time.sleep(0.5); print(1)")) for _ in range(3)]
    for _ in range(2):
        await asyncio.sleep(0)  # they are admitted, then handed over
    os.kill(sandbox.fork_server, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert [each.stdout for each in await asyncio.gather(*tasks)] == [b"1\n"] * 3


async def test_programs_of_a_fork_server_that_dies_again_are_failures(sandbox):
    idle = len(below([sandbox.fork_server]))
    task = asyncio.create_task(run(sandbox, "import time; time.sleep(60)"))
    while not task.done():
        if len(below([sandbox.fork_server])) > idle:  # it has the program
            os.kill(sandbox.fork_server, signal.SIGKILL)
        await asyncio.sleep(0.01)
    assert isinstance(task.exception(), SandboxUnavailable)
    async with asyncio.timeout(30):
        assert (await run(sandbox, "print(1)")).stdout == b"1\n"


async def test_a_start_goes_on_for_the_next_program_when_its_own_is_given_up():
    others = own_processes()
    sandbox = Sandbox(SandboxSection(python=interpreter(MODES[0])))
    given_up = asyncio.create_task(run(sandbox, "print(1)"))
    await until(lambda: own_processes() - others)
    started = own_processes() - others
    given_up.cancel()
    await asyncio.wait({given_up})
    assert (await run(sandbox, "print(2)")).stdout == b"2\n"
    assert sandbox.fork_server in started
    await sandbox.close()
    assert own_processes() <= others


@pytest.mark.parametrize("mode", MODES)
async def test_it_ends_after_all_that_runs_in_it(mode):
    others = own_processes()
    sandbox = await open_sandbox(settings(mode), only=mode)
    before = own_processes()
    source = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); break\ntime.sleep(60)"
    running = asyncio.create_task(run(sandbox, source, limits=Limits(wall_seconds=60.0)))
    async with asyncio.timeout(60):
        while len(own_processes() - before) < 4:
            await asyncio.sleep(0.01)
    await sandbox.close()
    assert own_processes() <= others
    with pytest.raises(ShuttingDown):
        await running


async def test_under_a_umask_that_shuts_others_out_it_holds_and_packages_can_be_imported():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # under /tmp programs have their own
        os.chmod(folder, 0o755)
        Path(folder, "quartet_test_package.py").write_text("ANSWER = 42\n")
        chosen = SandboxSection(packages=(folder,), python=interpreter(MODES[0]))
        before = os.umask(0o077)
        try:
            sandbox = await open_sandbox(chosen, only=MODES[0])
        finally:
            os.umask(before)
        try:
            execution = await run(sandbox, "import json, quartet_test_package as p; print(json.dumps(p.ANSWER))")
            assert execution.stdout == b"42\n", execution
        finally:
            await sandbox.close()


async def test_a_minimum_that_cannot_be_had_is_refused_with_the_cure():
    with pytest.raises(SandboxUnavailable, match="minimum = 'namespaces'.*user.max_user_namespaces") as caught:
        await open_sandbox(SandboxSection(minimum=Mode.NAMESPACES, python="/bin/false"))
    assert "the fork server could not start" in str(caught.value)


FOR_EVER = Job("script", b"import time\ntime.sleep(600)")


@asynccontextmanager
async def occupied(queue_seconds: float) -> AsyncIterator[tuple[Sandbox, list[asyncio.Task]]]:
    """A sandbox of two slots, and the programs that have them."""
    sandbox = await open_sandbox(SandboxSection(slots=2), queue_seconds=queue_seconds)
    busy = [asyncio.create_task(sandbox.run(FOR_EVER)) for _ in range(2)]
    try:
        await until(lambda: sandbox.running == 2)
        yield sandbox, busy
    finally:
        await sandbox.close()
        await asyncio.gather(*busy, return_exceptions=True)


ECHO = program("print(input())", [(str(i), str(i)) for i in range(3)])


async def test_waiting_for_a_slot_is_no_time_of_the_programs():
    async with occupied(60.0) as (sandbox, busy):
        scoring = asyncio.create_task(judged(sandbox, ECHO, total_seconds=1.0))
        await until(lambda: sandbox.waiting)
        await asyncio.sleep(1.1)  # longer than the program may take
        for task in busy:
            task.cancel()
        assert (await scoring).score.outcome == reward_pb2.OUTCOME_CORRECT


async def test_no_slot_is_a_failure_and_never_a_verdict():
    async with occupied(0.05) as (sandbox, _):
        assert (await judged(sandbox, ECHO)).failure.kind == reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE


async def test_a_range_that_is_taken_is_passed_over_until_it_is_free_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server_handle, "_USERS", tmp_path / "users")
    taken = [(*take_users(FIRST, count), count) for count in (6, 500)]
    taken.append((*take_users(taken[1][0] + 256, 6), 6))
    assert taken[0][0] == FIRST
    assert len({user for first, _, count in taken for user in range(first, first + count)}) == 512
    os.close(taken[0][1])
    again = (*take_users(FIRST, 6), 6)
    assert again[0] == FIRST
    for _, lock, _ in (*taken[1:], again):
        os.close(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
async def test_two_sandboxes_leave_each_others_programs_alone() -> None:
    section = SandboxSection(first_uid=FIRST)
    sandboxes = [await open_sandbox(section), await open_sandbox(section)]
    job = Job("script", b"import time\ntime.sleep(0.3)", limits=Limits(wall_seconds=20))
    executions = await asyncio.gather(*(each.run(job) for each in sandboxes for _ in range(6)))
    await asyncio.gather(*(each.close() for each in sandboxes))
    assert [(each.ending, each.exit_code) for each in executions] == [(ExitReason.EXITED, 0)] * 12
