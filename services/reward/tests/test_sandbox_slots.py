"""Slots of the sandbox: waiting for one is never held against a program, and no two sandboxes share users."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from quartet.v1 import reward_pb2
from reward_samples import program, result_of, scorer, spec, until

from quartet_reward.config import SandboxSection
from quartet_reward.sandbox import server_handle
from quartet_reward.sandbox.api import ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.pool import IsolatedSandbox
from quartet_reward.sandbox.server_handle import Users

FOR_EVER = Job("script", b"import time\ntime.sleep(600)")


@asynccontextmanager
async def occupied(queue_seconds: float) -> AsyncIterator[tuple[IsolatedSandbox, list[asyncio.Task]]]:
    """A sandbox of two slots, and the programs that have them."""
    sandbox = await open_sandbox(SandboxSection(slots=2), queue_seconds=queue_seconds)
    busy = [asyncio.create_task(sandbox.run(FOR_EVER)) for _ in range(2)]
    try:
        await until(lambda: sandbox.running == 2)
        yield sandbox, busy
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await sandbox.close()


def score(sandbox: IsolatedSandbox, **parameters: object) -> asyncio.Task[reward_pb2.ScoreResult]:
    item = program("print(input())", [(str(i), str(i)) for i in range(3)])
    item.verifiers.append(spec("code", **parameters))
    return asyncio.create_task(result_of(item, scorer(sandbox)))


async def test_waiting_for_a_slot_is_no_time_of_the_programs():
    async with occupied(60.0) as (sandbox, busy):
        began = time.perf_counter()
        scoring = score(sandbox, total_seconds=1.0)
        await until(lambda: sandbox.waiting)
        waits = time.perf_counter()
        await asyncio.sleep(1.1)
        waited = time.perf_counter() - waits
        for task in busy:
            task.cancel()
        found = await scoring
        taken, elapsed = time.perf_counter() - began, found.score.elapsed.ToMilliseconds() / 1000
        assert found.score.outcome == reward_pb2.OUTCOME_CORRECT, found
        assert 0 < elapsed <= taken - waited, (elapsed, taken, waited)


async def test_no_slot_is_a_failure_and_never_a_verdict():
    async with occupied(0.05) as (sandbox, _):
        with pytest.raises(SandboxUnavailable, match="no slot became free"):
            await sandbox.run_judged(Job("judge", b""), Job("candidate", b""))
        assert (await score(sandbox)).failure.kind == reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE


async def test_whoever_waits_when_the_service_ends_is_not_judged():
    async with occupied(60.0) as (sandbox, _):
        scoring = score(sandbox)
        await until(lambda: sandbox.waiting)
        await sandbox.close()
        assert (await scoring).failure.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN


FIRST = 71_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(server_handle, "_folder", lambda: tmp_path)


def test_a_range_that_is_taken_is_passed_over_until_it_is_free_again() -> None:
    one, wide = Users(FIRST, 6), Users(FIRST, 500)
    inside = Users(wide.first + 300, 6)
    taken = [
        user for each, count in ((one, 6), (wide, 500), (inside, 6)) for user in range(each.first, each.first + count)
    ]
    assert one.first == FIRST and len(set(taken)) == 512
    one.release()
    again = Users(FIRST, 6)
    assert again.first == FIRST
    for each in (wide, inside, again):
        each.release()


def test_that_there_are_none_left_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_handle, "_MOST_BLOCKS", 2)
    taken = [Users(FIRST, 6), Users(FIRST, 6)]
    with pytest.raises(SandboxUnavailable, match=r"reward\.sandbox\.first_uid"):
        Users(FIRST, 6)
    for each in taken:
        each.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
async def test_two_sandboxes_leave_each_others_programs_alone() -> None:
    section = SandboxSection(first_uid=FIRST)
    sandboxes = [await open_sandbox(section), await open_sandbox(section)]
    job = Job("script", b"import time\ntime.sleep(0.3)", limits=Limits(wall_seconds=20))
    executions = await asyncio.gather(*(each.run(job) for each in sandboxes for _ in range(6)))
    await asyncio.gather(*(each.close() for each in sandboxes))
    assert [(each.ending, each.exit_code) for each in executions] == [(ExitReason.EXITED, 0)] * 12
