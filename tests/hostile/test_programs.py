"""The sandbox contains hostile programs, run concurrently with honest ones, in every mode of this machine."""

import asyncio
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import gt
from pathlib import Path

import pytest
from sandbox_modes import MODES, open_sandbox, own_processes, settings

from quartet_reward.config import Mode, SandboxSection
from quartet_reward.sandbox.api import Execution, ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.pool import check_sandbox
from tests.hostile.programs import PROGRAMS, Program

LIMITS = Limits(
    wall_seconds=4.0,
    cpu_seconds=20.0,
    memory_bytes=192 << 20,
    processes=16,
    scratch_bytes=8 << 20,
    file_bytes=4 << 20,
    open_files=32,
    output_bytes=64 << 10,
)
# A short limit for programs that only end at it.
ENDLESS = replace(LIMITS, wall_seconds=1.0)
HONEST = Job("script", b"print(sum(range(1000)))  # QUARTET-SECRET-OF-ANOTHER-JOB", limits=Limits(wall_seconds=20))
SLOTS = 6
# Tolerance of a killed program's time limit, as several programs share two cores.
BUSY_SECONDS = 1.0
# Longest time from a program's result to the release of what its fork server held for it.
RELEASE_SECONDS = 10.0


@dataclass
class Results:
    """The results of all programs in one mode."""

    executions: dict[str, Execution] = field(default_factory=dict)
    honest_seconds: list[float] = field(default_factory=list)
    survivors: int = 0
    left_over: set[int] = field(default_factory=set)
    descriptors: tuple[int, int] = (0, 0)
    held: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})


@pytest.fixture(scope="module", params=MODES)
def results(request: pytest.FixtureRequest) -> Results:
    return asyncio.run(run_programs(request.param))


async def run_programs(mode: Mode) -> Results:
    try:
        sandbox = await open_sandbox(settings(mode, SLOTS), only=mode)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    results = Results()
    try:
        await sandbox.run(HONEST)
        before, held_before = descriptors(), held()
        stop = asyncio.Event()

        async def honest() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                execution = await sandbox.run(HONEST)
                assert execution.stdout == b"499500\n", execution
                results.honest_seconds.append(time.perf_counter() - began)

        async def hostile(program: Program) -> None:
            source = program.source.encode("utf-8", "surrogateescape")
            results.executions[program.name] = await sandbox.run(Job("script", source, limits=limits_of(program)))

        meanwhile = asyncio.create_task(honest())
        await asyncio.gather(*map(hostile, PROGRAMS))
        stop.set()
        await meanwhile
        assert (await sandbox.run(HONEST)).stdout == b"499500\n"
        results.descriptors = before, descriptors()
        deadline = time.monotonic() + RELEASE_SECONDS
        while more_than(held_before, held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        results.held = held_before, held()
        results.survivors = sandbox.survivors
    finally:
        await sandbox.close()
    results.left_over = own_processes()
    return results


def limits_of(program: Program) -> Limits:
    return ENDLESS if program.endings[0] is ExitReason.TIMED_OUT else LIMITS


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def held() -> dict[int, tuple[int, int]]:
    """Descriptors and mounts of each process of the sandboxes, by process id: with the processes themselves, all that
    could keep a program's tmpfs."""
    found = {}
    for pid in own_processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            folder = Path(f"/proc/{pid}")
            found[pid] = len(os.listdir(folder / "fd")), len((folder / "mountinfo").read_text().splitlines())
    return found


def more_than(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> set[int]:
    """Return the processes, there before and after, that hold more than before."""
    return {pid for pid in before.keys() & after.keys() if any(map(gt, after[pid], before[pid]))}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_hostile_program_ends_without_escape(results: Results, program: Program) -> None:
    execution = results.executions[program.name]
    description = (
        f"{execution.ending} {execution.exit_code} {execution.signal}\n{execution.stdout!r}\n{execution.stderr!r}"
    )
    assert execution.ending in program.endings, description
    assert b"ESCAPED" not in execution.stdout, description
    if program.refused:
        assert b"REFUSED" in execution.stdout, description
    assert execution.wall_seconds < limits_of(program).wall_seconds + BUSY_SECONDS
    assert len(execution.stdout) <= LIMITS.output_bytes and len(execution.stderr) <= LIMITS.output_bytes


def test_hostile_programs_leave_no_process_or_file(results: Results) -> None:
    assert results.left_over == set()
    assert results.survivors == 0
    assert results.descriptors[1] <= results.descriptors[0]
    before, after = results.held
    assert before.keys() & after.keys() and not more_than(before, after), results.held
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 512 << 10


def test_honest_programs_ran_in_the_meantime(results: Results) -> None:
    assert len(results.honest_seconds) >= 5
    # Each waits its turn behind hostile ones that run to their limit, on slots that all share.
    assert max(results.honest_seconds) < 30


def test_a_sandbox_mode_works_on_this_machine() -> None:
    assert asyncio.run(check_sandbox(SandboxSection())) in MODES
