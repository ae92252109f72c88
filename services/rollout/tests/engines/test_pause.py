"""Contract of every engine: pausing between two tokens and going on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from harness import FORMS, PATIENCE, PROMPT, Harness

from quartet_rollout.engines import EngineError, SamplingSettings

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE),
    pytest.mark.parametrize("loaded", FORMS[:2], indirect=True, scope="session"),
]
LONG = SamplingSettings(max_new_tokens=300, temperature=0.0)
# Beside other work, this process may be kept from pausing for as long as vLLM takes for hundreds of tokens.
ENDLESS = SamplingSettings(max_new_tokens=2000, temperature=0.0)
SEVERAL = SamplingSettings(max_new_tokens=1000, temperature=0.2)


def test_keep_stops_between_tokens_and_goes_on_as_if_nothing_was(harness: Harness) -> None:
    (expected,) = harness.run(harness.collect(PROMPT, 1, LONG))

    async def body() -> list:
        reading = asyncio.create_task(harness.collect(PROMPT, 1, ENDLESS))
        await harness.started(20)
        await harness.engine.pause("keep")
        tokens = harness.engine.stats().tokens_total
        for _ in range(10):  # each is answered between two steps, if any were made
            await harness.engine.set_version(0)
        assert harness.engine.stats().tokens_total == tokens
        assert harness.engine.stats().running == 1 and not reading.done()
        await harness.engine.resume()
        await harness.until(lambda: reading.done() or harness.engine.stats().tokens_total > tokens + 20)
        await harness.engine.pause("abort")
        return await reading

    (completion,) = harness.run(body())
    both = min(len(completion.token_ids), len(expected.token_ids))
    assert both > 40
    np.testing.assert_array_equal(completion.token_ids[:both], expected.token_ids[:both])
    np.testing.assert_allclose(completion.log_probs[:both], expected.log_probs[:both], atol=1e-4)


def test_wait_finishes_what_runs_and_holds_what_comes(harness: Harness) -> None:
    async def body() -> None:
        reading = asyncio.create_task(harness.collect(PROMPT, 6, SEVERAL))
        await harness.started(6)
        assert harness.engine.stats().running >= 1
        pausing = asyncio.create_task(harness.engine.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.create_task(harness.collect(PROMPT, 2, LONG))
        await pausing
        assert harness.engine.stats().running == 0
        assert all(completion.finish_reason in ("stop", "length") for completion in await reading)
        await harness.until(lambda: harness.engine.stats().waiting == 2)
        assert harness.engine.stats().running == 0 and not later.done()
        await harness.engine.resume()
        assert len(await later) == 2

    harness.run(body())


def test_abort_ends_what_runs_with_what_there_is(harness: Harness) -> None:
    async def body() -> list:
        reading = asyncio.create_task(harness.collect(PROMPT, 6, SEVERAL))
        await harness.started(12)
        await harness.engine.pause("abort")
        return await reading

    completions = harness.run(body())
    assert [completion.index for completion in completions] == list(range(6))
    aborted = [completion for completion in completions if completion.finish_reason == "abort"]
    assert aborted
    for completion in aborted:
        length = len(completion.token_ids)
        assert 0 < length < 1000 and completion.version_spans == ((0, 0, length),)
        expected = harness.log_probs(harness.folders[0], PROMPT, completion.token_ids, 0.2)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)


def test_a_request_that_comes_during_a_pause_waits_and_can_be_given_up_and_so_can_a_pause(harness: Harness) -> None:
    async def body() -> None:
        await harness.engine.pause("keep")
        reading = asyncio.create_task(harness.collect(PROMPT, 3, LONG))
        await harness.until(lambda: harness.engine.stats().waiting == 3)
        reading.cancel()
        await harness.until(lambda: harness.engine.stats().waiting == 0)
        await harness.engine.resume()
        reading = asyncio.create_task(harness.collect(PROMPT, 8, ENDLESS))
        await harness.started(8)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(harness.engine.pause("wait"), 0.001)
        assert len(await harness.collect(PROMPT, 1, SamplingSettings(max_new_tokens=4))) == 1
        reading.cancel()

    harness.run(body())


def test_asleep_nothing_is_generated_and_afterwards_what_ran_goes_on_as_if_it_never_slept(harness: Harness) -> None:
    if "sleep" not in harness.engine.capabilities():
        return without_a_gpu_vllm_refuses_to_sleep_and_changes_nothing(harness)
    greedy = SamplingSettings(max_new_tokens=300, temperature=0.0)

    async def body() -> tuple[list, list]:
        undisturbed = await harness.collect(PROMPT, 4, greedy)
        reading = asyncio.create_task(harness.collect(PROMPT, 4, greedy))
        await harness.started(4)
        await harness.engine.sleep(1)
        tokens = harness.engine.stats().tokens_total
        parked = asyncio.create_task(harness.collect(PROMPT, 1, LONG))
        await harness.engine.sleep(1)  # again, behind the request that just came
        with pytest.raises(EngineError, match="the engine sleeps at level 1; wake it first"):
            await harness.engine.sleep(2)
        assert harness.engine.stats().tokens_total == tokens and not reading.done() and not parked.done()
        await harness.engine.pause("keep")
        await harness.engine.wake()
        assert harness.engine.stats().tokens_total == tokens, "a pause outlasts the sleep"
        await harness.engine.resume()
        assert len(await parked) == 1 and harness.engine.policy_version == 0
        made = await reading
        await harness.engine.sleep(2)
        await harness.engine.wake()
        assert harness.engine.policy_version == -1, "the weights were forgotten"
        return undisturbed, made

    for before, after in zip(*harness.run(body()), strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist() and after.version_spans == before.version_spans


def without_a_gpu_vllm_refuses_to_sleep_and_changes_nothing(harness: Harness) -> None:
    with pytest.raises(EngineError, match="cannot sleep; allowed: an engine on a GPU"):
        harness.run(harness.engine.sleep(1))
    assert len(harness.generate(max_new_tokens=4)) == 1
    assert harness.engine.policy_version == 0
