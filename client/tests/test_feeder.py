"""The feeder: creates, fills, waits for room, ends; and continues when it is started again."""

import asyncio

import pytest
from small_services import until

from quartet_client import AsyncClient, QuartetError
from quartet_client.data import DataSection
from quartet_client.feed import feed, keep_fed
from quartet_common.config import load_config


@pytest.fixture
def config(run_file_of):
    path = run_file_of("demo", 20, "heldout", run="max_queued_prompts = 16", data="passes = 2")
    return load_config("data", DataSection, path)


async def test_a_run_of_another_specification_is_refused(services, config):
    async with AsyncClient(services.addresses["broker"]) as client:
        other = config.run.model_copy(update={"group_size": 4})
        await client.create_run(other)
        with pytest.raises(QuartetError, match="run 'demo' exists and differs: group_size"):
            async with asyncio.timeout(20):  # it is not asked again
                await feed(config, client, asyncio.Event())


async def test_a_broker_that_forgot_prompts_is_given_all_of_them_again(services, config):
    """Its Redis was restored from a state before the last prompts that the feeder submitted."""
    broker = services.broker
    async with AsyncClient(services.addresses["broker"]) as client:
        feeding = asyncio.create_task(feed(config, client, asyncio.Event()))
        await until(lambda: broker.runs and broker._queued("demo") == 16)
        broker.instances["demo"].clear()
        broker.sets.clear()
        broker.room_made = 60
        assert (await feeding).ended_by == "prompts"
    assert {f"pass-{p}/{i}" for p in range(2) for i in range(20)} <= broker.instances["demo"].keys()
    assert len(broker.sets[("demo", "heldout")]) == 1


async def test_a_broker_that_forgot_the_end_of_the_prompts_is_given_them_again(services, config):
    broker = services.broker
    async with AsyncClient(services.addresses["broker"]) as client:
        feeding = asyncio.create_task(keep_fed(config, client, asyncio.Event(), look_seconds=0.05))
        await until(lambda: broker.runs)
        broker.room_made = 60
        await until(lambda: broker.runs["demo"].prompts_ended)
        for name in [name for name in broker.instances["demo"] if name.startswith("pass-1")]:
            del broker.instances["demo"][name]
        broker.runs["demo"].prompts_ended = False
        await until(lambda: broker.runs["demo"].prompts_ended)
        assert {f"pass-1/{i}" for i in range(20)} <= broker.instances["demo"].keys() and not feeding.done()
        await client.finish_run("demo", "succeeded", "max_steps reached")
        assert (await feeding).ended_by == "prompts"


async def test_a_broker_that_comes_late_is_waited_for(nowhere, config):
    stop = asyncio.Event()
    async with AsyncClient(nowhere) as client:
        feeding = asyncio.create_task(feed(config, client, stop))
        await asyncio.sleep(0.5)
        assert not feeding.done()
        stop.set()
        assert (await feeding).ended_by == "stop"
