"""What every mode of the sandbox promises to its callers. Attacks are in tests/hostile."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_modes import MODES, interpreter, settings

from quartet_reward.sandbox.api import Ending, Execution, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.chosen import ChosenSandbox
from quartet_reward.sandbox.isolated import IsolatedSandbox
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.settings import Mode, SandboxSection

# One sandbox of each mode for all tests: so all are on one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_seconds=20.0)
LATE_SECONDS = 1.0  # on a machine with much else to do; the benchmark measures it on a quiet one


@pytest_asyncio.fixture(params=MODES, scope="module", loop_scope="module")
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[IsolatedSandbox]:
    try:
        sandbox = await open_sandbox(settings(request.param), only=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()


async def run(sandbox: IsolatedSandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Execution:
    return await sandbox.run(Job("script", source.encode(), stdin, limits))


async def test_a_program_reads_writes_and_exits(sandbox: IsolatedSandbox) -> None:
    source = "import sys\nprint(sys.stdin.read().upper())\nprint('oh', file=sys.stderr)\nsys.exit(7)"
    execution = await run(sandbox, source, b"hello")
    assert (execution.ending, execution.exit_code, execution.signal) == (Ending.EXITED, 7, None)
    assert (execution.stdout, execution.stderr, execution.report) == (b"HELLO\n", b"oh\n", b"")
    assert execution.mode == sandbox.mode
    assert 0 < execution.cpu_seconds < 2
    assert execution.peak_memory_bytes > 1 << 20


async def test_nothing_is_left_of_what_the_fork_server_rehearsed(sandbox: IsolatedSandbox) -> None:
    source = "import sys\nprint([name in sys.modules for name in ('quartet_reward.code.warm_up', 'solution')])"
    assert (await run(sandbox, source)).stdout == b"[True, False]\n"


async def test_standard_input_ends_at_once_if_there_is_none(sandbox: IsolatedSandbox) -> None:
    assert (await run(sandbox, "import sys\nprint(repr(sys.stdin.read()))")).stdout == b"''\n"


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ("1/0", 1, b"ZeroDivisionError: division by zero"),
        ("def f(:", 1, b"SyntaxError"),
        ("import sys; sys.exit('no')", 1, b"no\n"),
        ("import sys; sys.exit()", 0, b""),
        ("import sys; sys.exit(True)", 1, b""),
        ("import sys; sys.exit(-1)", 255, b""),
        ("raise KeyboardInterrupt", 1, b"KeyboardInterrupt"),
        ("import os; os._exit(9)", 9, b""),
        ("import atexit, sys; atexit.register(print, 'late', file=sys.stderr)", 0, b"late\n"),
        ("import threading, time, sys\nt = lambda: (time.sleep(.1), print('thread', file=sys.stderr))\n"
         "threading.Thread(target=t).start()", 0, b"thread\n"),
    ],
)  # fmt: skip
async def test_a_program_ends_as_python_ends_it(
    sandbox: IsolatedSandbox, source: str, status: int, says: bytes
) -> None:
    execution = await run(sandbox, source)
    assert (execution.ending, execution.exit_code) == (Ending.EXITED, status), execution
    assert says in execution.stderr
    assert b"quartet_reward" not in execution.stderr


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
async def test_the_true_signal_is_told(sandbox: IsolatedSandbox, number: signal.Signals) -> None:
    execution = await run(sandbox, f"import os; os.kill(os.getpid(), {number:d})")
    assert (execution.ending, execution.signal, execution.exit_code) == (Ending.SIGNALLED, number, None)


@pytest.mark.parametrize(
    ("source", "limits", "ending"),
    [
        ("while True: pass", Limits(wall_seconds=0.5), Ending.TIMED_OUT),
        ("while True: pass", Limits(wall_seconds=20, cpu_seconds=1), Ending.TIMED_OUT),
        ("import os\nos.fork()\nwhile True: pass", Limits(wall_seconds=20, cpu_seconds=1), Ending.TIMED_OUT),
        ("x = bytearray(1 << 30)", Limits(memory_bytes=256 << 20), Ending.MEMORY_EXCEEDED),
        ("print('x' * 2000)", Limits(output_bytes=1000), Ending.OUTPUT_EXCEEDED),
        ("print('x' * 999)", Limits(output_bytes=1000), Ending.EXITED),
    ],
)
async def test_limits_hold(sandbox: IsolatedSandbox, source: str, limits: Limits, ending: Ending) -> None:
    execution = await run(sandbox, source, limits=limits)
    assert execution.ending is ending, execution
    assert execution.wall_seconds < limits.wall_seconds + LATE_SECONDS
    assert len(execution.stdout) <= limits.output_bytes


async def test_a_tree_that_outlives_its_program_is_killed_at_once(sandbox: IsolatedSandbox) -> None:
    source = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint(1)"
    began, survivors = time.monotonic(), sandbox.survivors
    execution = await run(sandbox, source)
    assert (execution.ending, execution.stdout) == (Ending.EXITED, b"1\n")
    assert time.monotonic() - began < 10
    assert sandbox.survivors == survivors


async def test_random_numbers_differ_from_run_to_run(sandbox: IsolatedSandbox) -> None:
    first, second = [await run(sandbox, "import random; print(random.random())") for _ in range(2)]
    assert first.stdout != second.stdout


async def test_judge_and_candidate_have_one_socket_and_the_judge_a_report(sandbox: IsolatedSandbox) -> None:
    judge = b"import os, socket\ns = socket.socket(fileno=3)\ns.send(b'ask')\nos.write(4, s.recv(99))"
    candidate = b"import socket, time\ns = socket.socket(fileno=3)\ns.send(s.recv(99) * 2)\ntime.sleep(60)"
    judged, answered = await sandbox.run_judged(Job("script", judge), Job("script", candidate))
    assert (judged.ending, judged.report) == (Ending.EXITED, b"askask")
    assert (answered.ending, answered.signal, answered.report) == (Ending.SIGNALLED, signal.SIGKILL, b"")


async def test_a_candidate_has_no_report_pipe(sandbox: IsolatedSandbox) -> None:
    candidate = b"import os\ntry: os.write(4, b'forged')\nexcept OSError: print('none')"
    judged, answered = await sandbox.run_judged(Job("script", b"import os; os.read(3, 1)"), Job("script", candidate))
    assert answered.stdout == b"none\n"
    assert judged.report == b""


async def test_a_judge_hears_that_the_candidate_has_ended(sandbox: IsolatedSandbox) -> None:
    judge = b"import os, socket\ns = socket.socket(fileno=3)\nos.write(4, b'end' if not s.recv(9) else b'')"
    judged, _ = await sandbox.run_judged(Job("script", judge), Job("script", b"import os; os._exit(0)"))
    assert judged.report == b"end"


async def test_a_cancelled_run_is_killed_and_its_slots_are_free_again(sandbox: IsolatedSandbox) -> None:
    endless = Job("script", b"while True: pass", limits=Limits(wall_seconds=60))
    tasks = [asyncio.create_task(sandbox.run(endless)) for _ in range(6)]  # two of them wait for a slot
    tasks.append(asyncio.create_task(sandbox.run_judged(endless, endless)))
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(15):
        executions = await asyncio.gather(*(run(sandbox, "print(1)") for _ in range(8)))
    assert {execution.stdout for execution in executions} == {b"1\n"}


async def test_many_run_at_a_time_and_none_is_lost(sandbox: IsolatedSandbox) -> None:
    executions = await asyncio.gather(*(run(sandbox, f"print({number})") for number in range(40)))
    assert [int(execution.stdout) for execution in executions] == list(range(40))


async def test_a_dead_fork_server_is_started_again_and_runs_its_programs_again(sandbox: IsolatedSandbox) -> None:
    tasks = [asyncio.create_task(run(sandbox, "import time; time.sleep(0.5); print(1)")) for _ in range(3)]
    await asyncio.sleep(0)  # they are handed over
    for pid in sandbox.fork_servers:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert [each.stdout for each in await asyncio.gather(*tasks)] == [b"1\n"] * 3


async def test_programs_of_a_fork_server_that_dies_again_are_failures(sandbox: IsolatedSandbox) -> None:
    task = asyncio.create_task(run(sandbox, "import time; time.sleep(60)"))
    while not task.done():
        for pid in sandbox.fork_servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)  # until one of them has taken the program
    assert isinstance(task.exception(), SandboxUnavailable)
    async with asyncio.timeout(30):
        assert (await run(sandbox, "print(1)")).stdout == b"1\n"


async def test_no_descriptor_and_no_memory_is_lost(sandbox: IsolatedSandbox) -> None:
    await asyncio.gather(*(run(sandbox, "print(1)") for _ in range(10)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await asyncio.gather(*(run(sandbox, "print(1)") for _ in range(20)))
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_an_unknown_entry_is_refused(sandbox: IsolatedSandbox) -> None:
    with pytest.raises(ValueError, match="no entry 'nothing'; there are .*script"):
        await sandbox.run(Job("nothing", b""))


async def test_limits_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes must exceed scratch_bytes"):
        replace(LIMITS, memory_bytes=1 << 20, scratch_bytes=1 << 20)


async def test_after_its_end_it_runs_nothing() -> None:
    sandbox = ChosenSandbox(SandboxSection())
    await sandbox.close()
    with pytest.raises(SandboxUnavailable):
        await sandbox.run(Job("script", b"print(1)"))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not Mode.UNSAFE])
async def test_it_ends_after_all_that_runs_in_it(mode: Mode) -> None:
    others = own_processes()
    sandbox = await open_sandbox(settings(mode), only=mode)
    before = own_processes()
    source = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); break\ntime.sleep(60)"
    running = asyncio.create_task(run(sandbox, source, limits=replace(LIMITS, wall_seconds=60.0)))
    async with asyncio.timeout(60):
        while len(own_processes() - before) < 4:
            await asyncio.sleep(0.01)
    await sandbox.close()
    assert own_processes() <= others
    with pytest.raises(SandboxUnavailable):
        await running


def own_processes() -> set[int]:
    """The processes of sandboxes of this process: they bear its number in the command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f'"parent": {os.getpid()}'.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


async def test_it_holds_under_a_umask_that_shuts_others_out() -> None:
    before = os.umask(0o077)
    try:
        sandbox = await open_sandbox(SandboxSection(minimum=Mode.UNSAFE, python=interpreter(MODES[0])), only=MODES[0])
    finally:
        os.umask(before)
    try:
        assert (await run(sandbox, "import json; print(json.dumps(1))")).stdout == b"1\n"
    finally:
        await sandbox.close()


async def test_packages_can_be_imported() -> None:
    # Not under /tmp, where programs have their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "quartet_test_package.py").write_text("ANSWER = 42\n")
        chosen = SandboxSection(minimum=Mode.UNSAFE, packages=(folder,), python=interpreter(MODES[0]))
        sandbox = await open_sandbox(chosen, only=MODES[0])
        try:
            execution = await run(sandbox, "import quartet_test_package as p; print(p.ANSWER)")
            assert execution.stdout == b"42\n", execution
        finally:
            await sandbox.close()


@pytest.mark.parametrize("packages", ["relative/path", "/tmp/packages", "/nowhere/at/all"])
async def test_folders_of_packages_that_cannot_be_shown_are_refused(packages: str) -> None:
    with pytest.raises(ValueError, match="packages"):
        SandboxSection(packages=(packages,))


async def test_a_minimum_that_cannot_be_had_is_refused_with_the_cure() -> None:
    with pytest.raises(SandboxUnavailable, match="minimum = 'namespaces'.*user.max_user_namespaces") as caught:
        await open_sandbox(SandboxSection(minimum=Mode.NAMESPACES, python="/bin/false"))
    assert "the fork server could not start" in str(caught.value)
