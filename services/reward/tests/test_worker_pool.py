"""The life of a worker: what it judges, and when it ends. test_service.py kills workers at work."""

import asyncio
import os

import pytest
from reward_samples import ENDLESS, until

from quartet_reward.errors import ShuttingDown
from quartet_reward.math.equality import worker_command
from quartet_reward.workers.pool import WorkerPool

QUICK = {"reference": r"\sqrt{64}", "answer": "8"}


async def test_a_worker_judges_so_many_references_and_another_takes_its_place_until_the_pool_closes():
    pool = WorkerPool("math", worker_command(1 << 30), 600.0, queue_seconds=60.0, recycle_after=3)
    pool.start()
    try:
        assert await pool.run({"reference": QUICK["reference"]}) == {"event": "judged", "is_text": False}
        (first,) = pool.pids
        # It leaves the processors to what answers.
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
        assert (os.getsid(first), os.getpriority(os.PRIO_PROCESS, first)) == (first, nice)
        assert (await pool.run({"reference": "x = x"}))["event"] == "bad_reference"
        # It can be read, and its text repeated; that it cannot be evaluated does not make it a bad one.
        assert (await pool.run({"reference": ENDLESS}))["event"] == "judged"
        assert await pool.run(QUICK) == {"event": "done", "equal": True}
        (second,) = pool.pids
        assert second != first
        running = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
        queued = asyncio.create_task(pool.run(QUICK))
        await until(lambda: pool.busy == 1 and pool.waiting == 1)
    finally:
        await pool.close()
    for task in (running, queued):
        with pytest.raises(ShuttingDown):
            await task
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (first, second))
