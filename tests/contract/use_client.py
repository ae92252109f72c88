"""What a person does with the client, today's and a release's; nothing else of today is imported."""

import asyncio
from contextlib import aclosing

from quartet_client import AsyncClient


async def use_client(addresses: dict[str, str], run_id: str) -> None:
    """Make a run and go through it. Raises AssertionError."""
    async with AsyncClient(**addresses) as client:
        today = hasattr(client, "list_runs")  # v1.0 has shorter names
        list_runs, get_group, list_verifiers = (
            (client.list_runs, client.get_group, client.list_verifiers)
            if today
            else (client.runs, client.place, client.verifiers)
        )
        run = await client.create_run(run_id)
        assert run.run_id == run_id and run_id in {each.run_id for each in await list_runs()}
        (handle,) = await client.submit(run_id, "1+1=?")
        assert (await get_group(handle)).state == "queued"
        right, wrong = await client.score([r"\boxed{2}", r"\boxed{3}"], {"prompt": "1+1", "gt_answer": "2"}, ["boxed"])
        assert right.reward > wrong.reward and "boxed" in await list_verifiers()
        assert {service.health for service in await client.status()} == {"serving"}
        assert (await client.generate("1+1=?"))[0].text
        async with asyncio.timeout(60), aclosing(client.watch(run_id)) as events:
            assert await anext(events)
        assert (await client.finish_run(run_id)).state == "cancelled"
