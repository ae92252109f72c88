"""Workers can be killed, and are replaced."""

import asyncio
import os
import signal
import time

import pytest
from reward_samples import DEADLINE_SECONDS, ENDLESS

from quartet_reward.worker_pool import PoolClosed
from quartet_reward.worker_process import TaskTimedOut, WorkerDied

QUICK = {"reference": r"\sqrt{64}", "answer": "8"}


def processes(pool) -> set[int]:
    return set(pool.pids)


async def until(condition, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_task_is_answered(pool):
    reply = await pool.run(QUICK)
    assert reply.message["event"] == "done" and reply.message["equal"]


@pytest.mark.parametrize("answer", [ENDLESS, "9^{9^{9^{9}}}"])
async def test_an_endless_answer_is_killed_at_the_deadline_and_the_next_is_served(pool, answer):
    await pool.run(QUICK)
    (victim,) = processes(pool)
    began = time.perf_counter()
    with pytest.raises(TaskTimedOut):
        await pool.run({"reference": "8", "answer": answer})
    assert time.perf_counter() - began < DEADLINE_SECONDS + 1
    assert (await pool.run(QUICK)).message["equal"]
    assert victim not in processes(pool)
    assert not os.path.exists(f"/proc/{victim}")


async def test_a_reference_is_judged_without_an_answer(pool):
    assert (await pool.run({"reference": QUICK["reference"]})).message == {"event": "judged", "is_text": False}
    assert (await pool.run({"reference": "x = x"})).message["event"] == "bad_reference"
    # It can be read, and its text repeated; that it cannot be evaluated does not make it a bad one.
    assert (await pool.run({"reference": ENDLESS})).message["event"] == "judged"


async def test_a_worker_killed_in_mid_task_is_told_and_replaced(pool):
    await pool.run(QUICK)
    (victim,) = processes(pool)
    task = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
    await until(lambda: pool.busy == 1)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="signal 9"):
        await task
    assert (await pool.run(QUICK)).message["equal"]


async def test_cancelling_kills_the_work(pool):
    await pool.run(QUICK)
    (victim,) = processes(pool)
    task = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
    await until(lambda: pool.busy == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not os.path.exists(f"/proc/{victim}"))
    assert (await pool.run(QUICK)).message["equal"]


async def test_a_worker_is_replaced_after_its_number_of_tasks(pool):
    seen = set()
    for _ in range(7):
        await pool.run(QUICK)
        seen |= processes(pool)
    assert len(seen) >= 3


async def test_what_a_worker_prints_breaks_nothing(pool):
    reply = await pool.run({"reference": "8", "answer": '"); print("x") #'})
    assert reply.message["event"] == "done" and not reply.message["equal"]


async def test_closing_ends_the_workers_and_whoever_waits(pool):
    await pool.run(QUICK)
    victims = processes(pool)
    running = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
    queued = asyncio.create_task(pool.run(QUICK))
    await until(lambda: pool.busy == 1 and pool.waiting == 1)
    await pool.close()
    for task in (running, queued):
        with pytest.raises(PoolClosed):
            await task
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victims)
