"""Contract of every engine: new weights between two tokens, and what happens when they do not come."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from harness import BUCKET_BYTES, PATIENCE, PROMPT, PROMPTS, Harness
from models import read_weights
from packing import pack

from quartet_rollout.engines import (
    EngineError,
    SamplingSettings,
    WeightTransferError,
)

TOLERANCE = 1e-4
pytestmark = pytest.mark.timeout(2 * PATIENCE)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=40)


def test_after_an_update_tokens_and_log_probs_are_those_of_a_fresh_load(harness: Harness) -> None:
    """Away from the weights that were loaded, and back to them by an update."""
    for version, folder in ((1, harness.folders[1]), (2, harness.folders[0])):
        harness.run(harness.update(folder, version))
        assert harness.engine.policy_version == version
        for prompt, fresh in zip(PROMPTS, harness.fresh, strict=True):
            (completion,) = harness.run(harness.collect(prompt, 1, GREEDY))
            reference = harness.log_probs(folder, prompt, completion.token_ids)
            np.testing.assert_allclose(completion.log_probs, reference, atol=TOLERANCE)
            assert completion.version_spans == ((version, 0, len(completion.token_ids)),)
            assert np.array_equal(completion.token_ids, fresh.token_ids) == (version == 2)
            if version == 2:
                np.testing.assert_allclose(completion.log_probs, fresh.log_probs, atol=1e-6)


def test_kept_keys_and_values_are_stale_as_asked_for(harness: Harness) -> None:
    async def body() -> list:
        sampling = SamplingSettings(temperature=0.3, max_new_tokens=900)
        reading = asyncio.create_task(harness.collect(PROMPT, 8, sampling))
        await harness.started(8 * 5)
        await harness.update(harness.folders[1], 1, keep_kv_cache=True)
        return await reading

    differences = []
    for completion in harness.run(body()):
        for version, begin, end in completion.version_spans:
            expected = harness.log_probs(harness.folders[version], PROMPT, completion.token_ids, 0.3)
            difference = float(np.abs(completion.log_probs[begin:end] - expected[begin:end]).max())
            if version == 0:
                assert difference < TOLERANCE
            else:
                differences.append(difference)
    assert max(differences) > 0.01


def test_prefixes_of_old_weights_are_not_reused_where_running_completions_keep_theirs(harness: Harness) -> None:
    prompt = [16 + (7 * position) % 60 for position in range(300)]  # Several blocks of a prefix cache.
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=10)
    for version, folder in ((0, harness.folders[0]), (1, harness.folders[1])):
        if version:
            harness.run(harness.update(folder, version, keep_kv_cache=True))
        for _ in range(2):  # The second finds the prefix of the first.
            (completion,) = harness.run(harness.collect(prompt, 1, sampling))
            expected = harness.log_probs(folder, prompt, completion.token_ids)
            np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE)


def test_weights_that_are_given_up_leave_model_and_version_which_may_be_set_or_made_unknown(harness: Harness) -> None:
    async def body() -> None:
        await harness.engine.pause("keep")
        await harness.receive(harness.folders[1])
        await harness.engine.leave_weight_group()
        harness.left_group()
        with pytest.raises(EngineError, match="no weights were received"):
            await harness.engine.install_weights(1)
        await harness.engine.resume()

    harness.run(body())
    _are_the_first(harness)
    harness.run(harness.engine.set_version(40))
    _are_the_first(harness, 40)
    harness.run(harness.engine.set_version(-1))
    _are_the_first(harness, -1)


def _are_the_first(harness: Harness, version: int = 0) -> None:
    """The weights that were loaded stand, as this version."""
    assert harness.engine.policy_version == version
    (completion,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    assert completion.version_spans == ((version, 0, len(completion.token_ids)),)
    np.testing.assert_array_equal(completion.token_ids, harness.fresh[0].token_ids)
    np.testing.assert_allclose(completion.log_probs, harness.fresh[0].log_probs, atol=1e-6)


async def _first_bucket(harness: Harness, seconds: float) -> tuple[asyncio.Task, int]:
    """Receive from a sender that stalls after the first of several buckets; also how many it has sent."""
    await harness.join()
    manifest, buckets = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
    assert len(buckets) > 2
    harness.sender.give(do="send_some", folder=str(harness.folders[1]), bucket_bytes=BUCKET_BYTES, buckets=1)
    receiving = asyncio.create_task(harness.engine.receive_weights(manifest, seconds))
    return receiving, (await asyncio.to_thread(harness.sender.hear))["sent"]


def test_a_sender_killed_in_mid_broadcast_costs_one_transfer(harness: Harness) -> None:
    async def seconds_until_missed() -> float:
        await harness.engine.pause("keep")
        receiving, sent = await _first_bucket(harness, 40.0)
        assert sent == 1
        began = time.monotonic()
        harness.sender.kill_member()
        with pytest.raises(WeightTransferError, match="broadcast of weights failed"):
            await asyncio.wait_for(receiving, 60.0)
        await harness.engine.resume()
        return time.monotonic() - began

    if harness.run(seconds_until_missed()) > 30:  # Seldom Gloo does not hear of it, and the deadline ends it.
        harness.left_group()
        assert harness.run(seconds_until_missed()) < 30
    harness.left_group()
    _are_the_first(harness)
    harness.run(harness.update(harness.folders[1], 1))  # The next epoch works.
    assert harness.engine.policy_version == 1


def test_a_sender_that_stalls_costs_the_deadline_and_cancelling_leaves_the_group(harness: Harness) -> None:
    async def stall() -> None:
        receiving, sent = await _first_bucket(harness, 0.5)
        assert sent <= 1  # On a busy machine the deadline may come before the first bucket.
        with pytest.raises(WeightTransferError):
            await asyncio.wait_for(receiving, 60.0)

    async def cancel() -> None:
        receiving, sent = await _first_bucket(harness, 200.0)
        assert sent == 1
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        manifest, _ = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
        with pytest.raises(EngineError, match="in no weight group"):
            await harness.engine.receive_weights(manifest, 20.0)

    for act in (stall, cancel):
        harness.run(asyncio.wait_for(act(), 60.0))
        harness.sender.kill_member()
        harness.left_group()
    _are_the_first(harness)
