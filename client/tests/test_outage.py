"""A broker that goes and comes back: what waits on a connection that stands is no outage."""

import asyncio
import re

import grpc
import pytest
from real_broker import Life, door

from quartet_client import AsyncClient, QuartetError, streams
from quartet_client.connection import BrokerOutage
from quartet_client.streams import submit_batch
from quartet_common.errors import resource_exhausted

PATIENCE = 1.5


async def test_a_quiet_stream_survives_any_number_of_short_outages_and_no_long_one(address, nowhere, monkeypatch):
    monkeypatch.setattr(streams, "_PATIENCE", PATIENCE)
    answered, ask = asyncio.Event(), streams._end_outage

    async def ask_and_tell(*arguments) -> None:
        await ask(*arguments)
        answered.set()

    monkeypatch.setattr(streams, "_end_outage", ask_and_tell)
    Life(address, "demo")
    async with AsyncClient(nowhere) as client, asyncio.timeout(60):
        with door(nowhere, address):
            following = asyncio.ensure_future(anext(client.watch("demo", after="$")))
            await answered.wait()
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            answered.clear()
            await asyncio.sleep(0.6)
            with door(nowhere, address):
                await answered.wait()
        assert asyncio.get_running_loop().time() - began > PATIENCE and not following.done()
        with pytest.raises(QuartetError) as failed:
            await following
    assert str(failed.value).startswith(f"events of run 'demo': broker at {nowhere}: nothing listens there; ")
    assert re.search(r"right\? \(away for [2-4] s\)$", str(failed.value)) and failed.value.exit_code == 2


@pytest.fixture
async def connections():
    made = AsyncClient()
    yield made.connections
    await made.close()


async def test_a_full_queue_is_an_answer(connections, monkeypatch):
    """A broker that goes away twice, and says in between that its queue is full, was not away all that time."""
    outage = BrokerOutage(PATIENCE, "prompts")
    full = resource_exhausted("max_queued_prompts", "the queue is full", retry_after_seconds=0.05)
    answers = iter([QuartetError(full.message, full.code, 0.05), None])

    async def call(*_):
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(connections.broker, "call", call)
    await outage.wait_or_raise(QuartetError("away", grpc.StatusCode.UNAVAILABLE))
    assert outage.seconds > 0
    await submit_batch(connections, "demo", [], outage=outage)
    assert outage.seconds == 0


async def test_a_limit_that_stays_reached_is_an_error_at_once(connections, monkeypatch):
    full = resource_exhausted("evaluation set 'heldout'", "it has 16384 prompts and at most 16384 are stored")

    async def call(*_):
        raise QuartetError(full.message, full.code)

    monkeypatch.setattr(connections.broker, "call", call)
    with pytest.raises(QuartetError, match="at most 16384 are stored"):
        async with asyncio.timeout(5):
            await submit_batch(connections, "demo", [])
