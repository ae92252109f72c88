"""The client and the feeder on the real broker and a real Redis."""

import asyncio
import json

import pytest
from real_broker import Life

from quartet_client import AsyncClient, QuartetError
from quartet_client.cli.main import main
from quartet_client.data import DataSection, RunData
from quartet_client.feed import feed, take_up
from quartet_client.progress import RunProgress
from quartet_client.streams import submit_batch
from quartet_client.view import RunView, watch_progress
from quartet_common.config import load_config
from quartet_common.run_spec import run_spec


@pytest.fixture
def config(run_file_of):
    keys = "max_queued_prompts = 16\ngroups_per_step = 100"
    path = run_file_of("feeding", 20, "heldout", run=keys, data="passes = 2")
    with (path.parent / "held.jsonl").open("a") as held:
        held.write('{"prompt": "8", "gt_answer": "9"}\n')
    return load_config("data", DataSection, path)


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (["data.passes=2", "run.max_steps=3"], "succeeded"),
        (["data.passes=2", "run.max_steps=4"], "active"),
        (["data.passes=3", "run.max_steps=3"], "active"),
        (["data.passes=0", "run.max_steps=3"], "active"),
    ],
)
async def test_a_finished_run_is_taken_up_if_the_run_file_asks_for_more(address, config, asked, state):
    settings = (["run.max_steps=3"], asked)
    again = [load_config("data", DataSection, config.path, ["run.id=again", *more]) for more in settings]
    data = [RunData.load(each) for each in again]
    async with AsyncClient(address) as client:
        await take_up(again[0], data[0], client)
        last = list(data[0].training_instances())[-1]
        await submit_batch(client.connections, "again", [last])
        await client.end_prompts("again", last.instance_id)
        await client.finish_run("again", "succeeded")
        run = await take_up(again[1], data[1], client)
        assert (run.state, run.newest_data_pass, run.prompts_ended) == (state, 1, state == "succeeded")
        await client.delete_run("again", force=True)


async def test_a_run_is_fed_where_it_was_evaluated_and_followed_to_its_end(address, config, capsys):
    async with AsyncClient(address) as client:
        await client.create_run(config.run)
        with pytest.raises(QuartetError, match="evaluation set 'other' does not exist"):
            await client.evaluate("feeding", "other")
        stop = asyncio.Event()
        feeding = asyncio.create_task(feed(config, client, stop))
        async with asyncio.timeout(60):
            while (await client.run("feeding")).stats.queued < 16:
                await asyncio.sleep(0.1)
        stop.set()
        report = await feeding
        assert (report.submitted, report.ended_by) == (16, "stop")
        assert not (await client.run("feeding")).prompts_ended
        life = Life(address, "feeding", run_spec(config.run))
        feeding = asyncio.create_task(feed(config, client, asyncio.Event()))
        while not feeding.done():
            await asyncio.to_thread(life.put, 64)
        report = await feeding
        assert (report.submitted, report.known, report.ended_by) == (24, 16, "prompts")
        assert (await client.run("feeding")).prompts_ended
        report = await feed(config, client, asyncio.Event())
        assert (report.submitted, report.ended_by) == (0, "prompts")
        command = ["eval", "feeding", "heldout", "--json", "--broker", address]
        evaluating = asyncio.create_task(asyncio.to_thread(main, command))
        while not evaluating.done():
            await asyncio.to_thread(life.put, 64)
        assert await evaluating == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["prompts"], result["finished"], result["accuracy"]) == (2, 2, 0.5)
        progress = RunProgress("feeding")
        watching = asyncio.create_task(watch_progress(client, RunView(progress, plain=True)))
        await client.finish_run("feeding", "cancelled", "enough")
        async with asyncio.timeout(60):
            await watching
        assert (progress.state, progress.reason) == ("cancelled", "enough") and progress.ended
        assert (await feed(config, client, asyncio.Event())).ended_by == "run"
        assert await client.delete_run("feeding")
        await client.create_run("another")
        with pytest.raises(QuartetError, match="run 'feeding' does not exist: .*; the runs there are: another"):
            await client.run("feeding")
