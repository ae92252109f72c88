"""A broker that goes and comes back: what waits on a connection that stands is no outage."""

import asyncio
import re

import grpc
import pytest
from small_services import SmallServices, until

from quartet_client import AsyncClient, QuartetError, streams
from quartet_client.connection import Outage
from quartet_client.streams import submit_batch
from quartet_common.errors import resource_exhausted

PATIENCE = 1.5
pytestmark = pytest.mark.timeout(60)


async def test_a_quiet_stream_survives_any_number_of_short_outages(nowhere, monkeypatch):
    monkeypatch.setattr(streams, "_PATIENCE", PATIENCE)
    loop = asyncio.get_running_loop()
    kept = {"runs": {}, "instances": {}, "events": {}}
    async with AsyncClient(nowhere) as client:
        first_failure = following = None
        for _ in range(4):
            with SmallServices(nowhere) as services:
                broker = services.broker
                vars(broker).update(kept)
                if following is None:
                    await client.create_run("demo")
                    following = asyncio.create_task(_last_event(client))
                await until(lambda broker=broker, following=following: broker.watchers or following.done())
                assert not following.done(), following.exception()
            first_failure = first_failure or loop.time()
            await asyncio.sleep(0.6)
        assert loop.time() - first_failure > PATIENCE and not following.done()
        with SmallServices(nowhere) as services:
            vars(services.broker).update(kept)
            await until(lambda: services.broker.watchers)
            await client.finish_run("demo", "succeeded", "enough")
            assert (await following).state == "succeeded"


async def _last_event(client):
    async for event in client.watch("demo"):
        last = event.what
    return last


async def test_a_broker_that_stays_away_is_told_with_its_address_and_what_was_asked_of_it(nowhere, monkeypatch):
    monkeypatch.setattr(streams, "_PATIENCE", PATIENCE)
    async with AsyncClient(nowhere) as client:
        with SmallServices(nowhere) as services:
            await client.create_run("demo")
            following = asyncio.create_task(_last_event(client))
            await until(lambda: services.broker.watchers)
        with pytest.raises(QuartetError) as failed:
            async with asyncio.timeout(20):
                await following
    assert str(failed.value).startswith(f"events of run 'demo': broker at {nowhere}: nothing listens there; ")
    assert re.search(r"right\? \(away for [2-4] s\)$", str(failed.value)) and failed.value.exit_code == 2


async def test_a_full_queue_is_an_answer():
    """A broker that goes away twice, and says in between that its queue is full, was not away all that time."""
    outage = Outage(PATIENCE, "prompts")
    full = resource_exhausted("max_queued_prompts", "the queue is full", retry_after_seconds=0.05)
    answers = iter([QuartetError(full.message, full.code, 0.05), None])

    class Connections:
        async def call(self, *_):
            if (error := next(answers)) is not None:
                raise error

    await outage.ride_out(QuartetError("away", grpc.StatusCode.UNAVAILABLE))
    assert outage.seconds > 0
    await submit_batch(Connections(), "demo", [], outage=outage)
    assert outage.seconds == 0
