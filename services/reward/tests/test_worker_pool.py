"""What workers judge, and when they end. tests/test_service.py kills them."""

import asyncio
import os

import pytest
from reward_samples import ENDLESS, until

from quartet_reward.errors import ShuttingDown

QUICK = {"reference": r"\sqrt{64}", "answer": "8"}


async def test_a_reference_is_judged_without_an_answer(pool):
    assert await pool.run({"reference": QUICK["reference"]}) == {"event": "judged", "is_text": False}
    assert (await pool.run({"reference": "x = x"}))["event"] == "bad_reference"
    # It can be read, and its text repeated; that it cannot be evaluated does not make it a bad one.
    assert (await pool.run({"reference": ENDLESS}))["event"] == "judged"


async def test_a_worker_leaves_the_processors_to_what_answers(pool):
    await pool.run(QUICK)
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
    assert [(os.getsid(pid) == pid, os.getpriority(os.PRIO_PROCESS, pid)) for pid in pool.pids] == [(True, nice)]


async def test_a_worker_is_replaced_after_its_number_of_tasks(pool):
    seen = set()
    for _ in range(4):
        await pool.run(QUICK)
        seen |= set(pool.pids)
    assert len(seen) == 2


async def test_closing_ends_the_workers_and_whoever_waits(pool):
    await pool.run(QUICK)
    victims = set(pool.pids)
    running = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
    queued = asyncio.create_task(pool.run(QUICK))
    await until(lambda: pool.busy == 1 and pool.waiting == 1)
    await pool.close()
    for task in (running, queued):
        with pytest.raises(ShuttingDown):
            await task
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victims)
