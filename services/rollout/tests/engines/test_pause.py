"""Contract of every engine: pausing between two tokens and going on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from harness import PATIENCE, PROMPT, Harness

from quartet_rollout.engines import EngineError, SamplingSettings

pytestmark = pytest.mark.timeout(2 * PATIENCE)
LONG = SamplingSettings(max_new_tokens=300, temperature=0.0, stop_token_ids=())


def test_keep_stops_between_tokens_and_goes_on_as_if_nothing_was(harness: Harness) -> None:
    (expected,) = harness.run(harness.collect(PROMPT, 1, LONG))

    async def body() -> list:
        reading = asyncio.create_task(harness.collect(PROMPT, 1, LONG))
        await harness.started(min(20, len(expected.token_ids) - 1))
        running = await harness.engine.pause("keep")
        tokens = harness.engine.stats().tokens_total
        await asyncio.sleep(0.05)  # some ten steps
        assert harness.engine.stats().tokens_total == tokens
        assert running == 1 and not reading.done()
        await harness.engine.resume()
        return await reading

    (completion,) = harness.run(body())
    np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected.log_probs, atol=1e-4)


def test_wait_finishes_what_runs_and_holds_what_comes(harness: Harness) -> None:
    async def body() -> None:
        sampling = SamplingSettings(max_new_tokens=100, temperature=0.2)
        reading = asyncio.create_task(harness.collect(PROMPT, 4, sampling))
        await harness.started(4)
        pausing = asyncio.create_task(harness.engine.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.create_task(harness.collect(PROMPT, 2, sampling))
        assert 1 <= await pausing <= 4
        assert all(completion.finish_reason in ("stop", "length") for completion in await reading)
        await harness.until(lambda: harness.engine.stats().waiting == 2)
        assert harness.engine.stats().running == 0 and not later.done()
        await harness.engine.resume()
        assert len(await later) == 2

    harness.run(body())


def test_abort_ends_what_runs(harness: Harness) -> None:
    async def body() -> list:
        reading = asyncio.create_task(harness.collect(PROMPT, 6, SamplingSettings(max_new_tokens=480, temperature=0.2)))
        await harness.started(12)
        await harness.engine.pause("abort")
        return await reading

    assert "abort" in {completion.finish_reason for completion in harness.run(body())}


def test_a_request_that_comes_during_a_pause_waits_and_can_be_aborted(harness: Harness) -> None:
    async def body() -> list:
        await harness.engine.pause("keep")
        reading = asyncio.create_task(harness.collect(PROMPT, 3, LONG, "parked"))
        await harness.until(lambda: harness.engine.stats().waiting == 3)
        await harness.engine.abort("parked")
        return await reading

    for completion in harness.run(body()):
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) == 0 and completion.version_spans == ()


def test_cancelling_a_pause_undoes_it(harness: Harness) -> None:
    async def body() -> None:
        sampling = SamplingSettings(max_new_tokens=480, temperature=0.2)
        reading = asyncio.create_task(harness.collect(PROMPT, 8, sampling, "long"))
        await harness.started(8)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(harness.engine.pause("wait"), 0.001)
        assert len(await harness.collect(PROMPT, 1, SamplingSettings(max_new_tokens=4))) == 1
        await harness.engine.abort("long")
        assert len(await reading) == 8

    harness.run(body())


def test_without_a_gpu_sleeping_is_refused_and_changes_nothing(harness: Harness) -> None:
    assert "sleep" not in harness.engine.capabilities()
    with pytest.raises(EngineError, match="cannot sleep; allowed: an engine on a GPU"):
        harness.run(harness.engine.sleep(1))
    harness.run(harness.engine.wake())
    assert len(harness.generate(max_new_tokens=4)) == 1
    assert harness.engine.policy_version == 0
