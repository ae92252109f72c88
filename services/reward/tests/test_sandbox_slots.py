"""Slots of the sandbox: waiting for one is never held against a program, and no two sandboxes share users."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program, until
from sandbox_modes import open_sandbox

from quartet_reward.config import SandboxSection
from quartet_reward.sandbox import server_handle
from quartet_reward.sandbox.api import ExitReason, Job, Limits
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.sandbox.server_handle import take_users

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
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await sandbox.close()


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


FIRST = 71_000


def test_a_range_that_is_taken_is_passed_over_until_it_is_free_again(tmp_path, monkeypatch) -> None:
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
