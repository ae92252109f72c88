"""Sandboxes of one machine do not share users."""

import asyncio
import os
from pathlib import Path

import pytest

from quartet_reward.config import SandboxSection
from quartet_reward.sandbox import server_handle
from quartet_reward.sandbox.api import ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.server_handle import Users

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
