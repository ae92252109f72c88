"""The client and the feeder on the real broker and a real Redis."""

import asyncio
from contextlib import suppress

import pytest
from real_broker import echoing_rollout

from quartet_client import AsyncClient, QuartetError
from quartet_client.data import DataSection
from quartet_client.feeder import feed
from quartet_client.progress import RunProgress
from quartet_client.view import RunView
from quartet_client.watching import watch_progress
from quartet_common.config import load_config


@pytest.fixture
async def rollout(address):
    """Start an echoing rollout for a run; it is gone after the test."""
    tasks = []

    def start(run_id: str) -> None:
        tasks.append(asyncio.create_task(echoing_rollout(address, run_id)))

    yield start
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _config(write, run_id: str, passes: int = 2):
    train = write("train.jsonl", "".join(f'{{"prompt": "{i}", "gt_answer": "{i}"}}\n' for i in range(20)))
    held = write("held.jsonl", '{"prompt": "7", "gt_answer": "7"}\n{"prompt": "8", "gt_answer": "9"}\n')
    text = (
        f"[run]\nid = '{run_id}'\nmax_queued_prompts = 16\ngroups_per_step = 100\n"
        f"[data]\ntrain = '{train}'\npasses = {passes}\n[data.evaluation]\nheldout = '{held}'\n"
    )
    return load_config("data", DataSection, write("run.toml", text))


async def test_the_broker_says_how_idle_it_is(address):
    async with AsyncClient(address) as client, asyncio.timeout(60):
        while (broker := (await client.status())[0]).idle_fraction is None:
            await asyncio.sleep(0.1)
    assert broker.kind == "broker" and 0 <= broker.idle_fraction <= 1


async def test_prompts_are_answered_and_the_dead_are_told(address, rollout):
    async with AsyncClient(address) as client:
        await client.create_run("serving")
        handles = await client.submit("serving", [{"prompt": "2+3=5", "gt_answer": "5"}, "hello", "bye"])
        assert (await client.place(handles[0])).state == "queued"
        rollout("serving")
        groups = {group.instance_id: group async for group in client.results(handles, timeout=60)}
        assert [groups[handle.instance_id].completions[0].text for handle in handles] == ["2+3=5", "hello", "bye"]
        assert groups[handles[0].instance_id].completions[0].reward == 1.0
        assert (await client.place(handles[0])).state == "delivered"
        assert await client.dead("serving") == ([], 0)


async def test_the_feeder_fills_a_bounded_queue_and_continues_where_it_was(address, rollout, write):
    config = _config(write, "feeding")
    async with AsyncClient(address) as client:
        await client.create_run(config.run)
        stop = asyncio.Event()
        feeding = asyncio.create_task(feed(config, client, stop))
        async with asyncio.timeout(60):
            while (await client.run("feeding")).stats.queued < 16:
                await asyncio.sleep(0.1)
        stop.set()
        report = await feeding
        assert (report.submitted, report.ended_by) == (16, "stop")
        rollout("feeding")
        report = await feed(config, client, asyncio.Event())
        assert (report.submitted, report.known, report.ended_by) == (24, 16, "prompts")
        assert (await client.run("feeding")).prompts_ended
        result = await client.evaluate("feeding", "heldout", timeout=60)
        assert (result.prompts, result.finished, result.accuracy) == (2, 2, 0.5)


async def test_a_run_is_followed_to_its_end(address, rollout, write):
    config = _config(write, "ending", passes=1)
    async with AsyncClient(address) as client:
        await client.create_run(config.run)
        rollout("ending")
        feeding = asyncio.create_task(feed(config, client, asyncio.Event()))
        progress = RunProgress("ending")
        watching = asyncio.create_task(watch_progress(client, RunView(progress, plain=True)))
        async with asyncio.timeout(60):
            await feeding
        await client.finish_run("ending", "cancelled", "enough")
        async with asyncio.timeout(60):
            await watching
        assert (progress.state, progress.reason) == ("cancelled", "enough") and progress.ended
        assert (await feed(config, client, asyncio.Event())).ended_by == "run"
        assert await client.delete_run("ending")
        with pytest.raises(QuartetError, match="ending"):
            await client.run("ending")
