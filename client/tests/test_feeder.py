"""The feeder on the real broker: creates, fills, waits for room, ends; and continues when it is started again."""

import asyncio
import json

import pytest
from real_broker import Life, life_of

from quartet_client import AsyncClient, QuartetError, async_client
from quartet_client.cli.main import main
from quartet_client.data import DataSection, RunData
from quartet_client.feed import create_or_extend, feed, keep_fed
from quartet_client.progress import RunProgress
from quartet_client.streams import submit_batch
from quartet_client.view import RunView, watch_progress
from quartet_common.config import CurriculumSection, load_config


@pytest.fixture
def config(run_file_of):
    keys = "max_queued_prompts = 16\ngroups_per_step = 100"
    path = run_file_of("demo", 20, "heldout", run=keys, data="passes = 2")
    with (path.parent / "held.jsonl").open("a") as held:
        held.write('{"prompt": "8", "gt_answer": "9"}\n')
    return load_config("data", DataSection, path)


@pytest.fixture
async def client(address):
    async with AsyncClient(address) as client, asyncio.timeout(120):
        yield client


async def until(client: AsyncClient, condition) -> None:
    """Wait until a condition is true of the run."""
    while not condition(await client.get_run("demo")):
        await asyncio.sleep(0.02)


async def answer_until(life: Life, task: asyncio.Task):
    """Make room by answering prompts until a task has ended; return its result."""
    while not task.done():
        await asyncio.to_thread(life.answer)
    return await task


async def test_a_run_is_fed_where_it_was_evaluated_and_followed_to_its_end(client, address, config, capsys):
    await client.create_run(config.run)
    with pytest.raises(QuartetError, match="evaluation set 'other' does not exist"):
        await client.evaluate("demo", "other")
    stop = asyncio.Event()
    feeding = asyncio.create_task(feed(config, client, stop))
    await until(client, lambda run: run.stats.queued == 16)
    stop.set()
    report = await feeding
    assert (report.submitted, report.ended_by) == (16, "stop")
    assert not (await client.get_run("demo")).prompts_ended
    life = life_of(address, config.path)
    report = await answer_until(life, asyncio.create_task(feed(config, client, asyncio.Event())))
    assert (report.submitted, report.known, report.ended_by) == (24, 16, "prompts")
    assert (await client.get_run("demo")).prompts_ended
    report = await feed(config, client, asyncio.Event())
    assert (report.submitted, report.ended_by) == (0, "prompts")
    command = ["eval", "demo", "heldout", "--json", "--broker", address]
    assert await answer_until(life, asyncio.create_task(asyncio.to_thread(main, command))) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompts"], result["finished"], result["accuracy"]) == (2, 2, 0.5)
    progress = RunProgress("demo")
    watching = asyncio.create_task(watch_progress(client, RunView(progress, plain=True)))
    await client.finish_run("demo", "cancelled", "enough")
    await watching
    assert (progress.state, progress.reason) == ("cancelled", "enough") and progress.ended
    assert (await feed(config, client, asyncio.Event())).ended_by == "run"
    assert await client.delete_run("demo")
    await client.create_run("another")
    with pytest.raises(QuartetError, match="run 'demo' does not exist: .*; the runs there are: another"):
        await client.get_run("demo")


async def test_a_broker_that_forgot_prompts_or_their_end_is_given_all_of_them_again(client, broker, config):
    """Its Redis is restored from a state before."""
    life = life_of(broker.address, config.path)
    broker.snapshot()
    feeding = asyncio.create_task(keep_fed(config, client, asyncio.Event(), look_seconds=0.05))
    await until(client, lambda run: run.stats.queued == 16)
    for _ in range(2):  # in the middle, and when all were there
        broker.restore()
        while not (run := await client.get_run("demo")).prompts_ended:
            await asyncio.to_thread(life.answer)
        assert run.stats.submitted == 40 + 2 and not feeding.done()
    await client.finish_run("demo", "succeeded", "max_steps reached")
    assert (await feeding).ended_by == "prompts"


async def test_a_run_of_another_specification_is_refused_at_once(client, config):
    await client.create_run(config.run.model_copy(update={"group_size": 4}))
    with pytest.raises(QuartetError, match="run 'demo' exists and differs: group_size"):
        async with asyncio.timeout(20):  # it is not asked again
            await feed(config, client, asyncio.Event())


async def test_create_run_with_a_curriculum_requires_the_brokers_capability(client, config, monkeypatch):
    curriculum = CurriculumSection(window=3)
    run = config.run.model_copy(update={"curriculum": curriculum})
    assert (await client.create_run(run)).spec.curriculum.window == 3
    monkeypatch.setattr(async_client, "CURRICULUM", "broker.of_a_later_build")
    with pytest.raises(
        QuartetError, match="the caller needs broker.of_a_later_build, which this service lacks; it has"
    ):
        await client.create_run(run)
    await client.create_run("another")


async def test_a_broker_that_comes_late_is_waited_for(nowhere, config):
    stop = asyncio.Event()
    async with AsyncClient(nowhere) as client:
        feeding = asyncio.create_task(feed(config, client, stop))
        await asyncio.sleep(0.5)
        assert not feeding.done()
        stop.set()
        assert (await feeding).ended_by == "stop"


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (["data.passes=2", "run.max_steps=3"], "succeeded"),
        (["data.passes=2", "run.max_steps=4"], "active"),
        (["data.passes=3", "run.max_steps=3"], "active"),
        (["data.passes=0", "run.max_steps=3"], "active"),
    ],
)
async def test_a_finished_run_is_taken_up_if_the_run_file_asks_for_more(client, config, asked, state):
    first, again = (load_config("data", DataSection, config.path, more) for more in (["run.max_steps=3"], asked))
    data = RunData.load(first)
    await create_or_extend(first, data, client)
    last = list(data.training_instances())[-1]
    await submit_batch(client.connections, "demo", [last])
    await client.end_prompts("demo", last.instance_id)
    await client.finish_run("demo", "succeeded")
    run = await create_or_extend(again, RunData.load(again), client)
    assert (run.state, run.newest_data_pass, run.prompts_ended) == (state, 1, state == "succeeded")
