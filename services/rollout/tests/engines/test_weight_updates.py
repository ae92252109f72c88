"""Contract of every engine: new weights between two tokens, and what happens when they do not come."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness import BUCKET_BYTES, PATIENCE, PROMPT, Harness
from models import read_weights
from packing import pack
from quartet.v1 import rollout_pb2

from quartet_rollout.engines import (
    EngineError,
    ManifestError,
    SamplingSettings,
    WeightGroupInfo,
    WeightTransferError,
)

TOLERANCE = 1e-4
pytestmark = pytest.mark.timeout(2 * PATIENCE)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=40)


def test_after_an_update_tokens_and_log_probs_are_those_of_a_fresh_load(harness: Harness) -> None:
    prompts = [PROMPT, [5, 6, 7], [40] * 30]
    old = [harness.run(harness.collect(prompt, 1, GREEDY))[0] for prompt in prompts]
    harness.run(harness.update(harness.folders[1], 1))
    assert harness.engine.policy_version == 1

    fresh = _fresh_load(harness, prompts)
    for prompt, before, (tokens, log_probs) in zip(prompts, old, fresh, strict=True):
        (completion,) = harness.run(harness.collect(prompt, 1, GREEDY))
        np.testing.assert_array_equal(completion.token_ids, tokens)
        np.testing.assert_allclose(completion.log_probs, log_probs, atol=1e-6)
        reference = harness.log_probs(harness.folders[1], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, reference, atol=TOLERANCE)
        assert not np.array_equal(completion.token_ids, before.token_ids)
        assert completion.version_spans == ((1, 0, len(completion.token_ids)),)


def _fresh_load(harness: Harness, prompts: list[list[int]]) -> list:
    arguments = [harness.engine.name, json.dumps(harness.options), str(harness.folders[1]), json.dumps(prompts)]
    script = Path(__file__).with_name("fresh_load.py")
    command = [sys.executable, str(script), *arguments, str(GREEDY.max_new_tokens)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PATIENCE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def test_an_update_in_flight_splits_completions_into_spans_of_their_versions(harness: Harness) -> None:
    async def body() -> list:
        sampling = SamplingSettings(temperature=0.3, max_new_tokens=400)
        reading = asyncio.create_task(harness.collect(PROMPT, 12, sampling))
        await harness.join()
        await harness.started(12 * 5)
        await harness.update(harness.folders[1], 1)
        await harness.started(12 * 5)
        await harness.update(harness.folders[0], 2)
        return await reading

    weights = {0: harness.folders[0], 1: harness.folders[1], 2: harness.folders[0]}
    completions = harness.run(body())
    assert max(len(completion.version_spans) for completion in completions) == 3
    for completion in completions:
        ends = [0]
        for version, begin, end in completion.version_spans:
            assert begin == ends[-1] < end
            ends.append(end)
            expected = harness.log_probs(weights[version], PROMPT, completion.token_ids, 0.3)
            # The keys and values of earlier tokens were computed again under these weights: nothing stale is left.
            np.testing.assert_allclose(completion.log_probs[begin:end], expected[begin:end], atol=TOLERANCE)
        assert ends[-1] == len(completion.token_ids)


def test_what_runs_is_said_to_run_while_it_stands_still_for_new_weights(harness: Harness) -> None:
    """The heartbeat of a new version goes out just then, and a gauge of 0 would say that nothing is done."""

    async def body() -> None:
        reading = asyncio.create_task(harness.collect(PROMPT, 4, SamplingSettings(temperature=0.2, max_new_tokens=480)))
        await harness.join()
        await harness.started(8)
        running = await harness.engine.pause("keep")
        await harness.receive(harness.folders[1])
        await harness.engine.install_weights(1)
        harness._installed = harness.folders[1]
        stats = harness.engine.stats()
        assert (stats.running, stats.waiting) == (running, 0) and running > 0
        await harness.engine.resume()
        await reading

    harness.run(body())


def test_kept_keys_and_values_are_stale_as_asked_for(harness: Harness) -> None:
    async def body() -> list:
        sampling = SamplingSettings(temperature=0.3, max_new_tokens=300)
        reading = asyncio.create_task(harness.collect(PROMPT, 8, sampling))
        await harness.join()
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


def test_weights_may_come_while_it_generates(harness: Harness) -> None:
    async def body() -> list:
        reading = asyncio.create_task(harness.collect(PROMPT, 4, SamplingSettings(temperature=0.3, max_new_tokens=300)))
        await harness.started(4)
        await harness.receive(harness.folders[1])
        assert harness.engine.policy_version == 0
        await harness.engine.install_weights(1)
        harness._installed = harness.folders[1]
        return await reading

    for completion in harness.run(body()):
        for version, begin, end in completion.version_spans:
            expected = harness.log_probs(harness.folders[version], PROMPT, completion.token_ids, 0.3)
            np.testing.assert_allclose(completion.log_probs[begin:end], expected[begin:end], atol=TOLERANCE)


def test_discarded_weights_leave_model_and_version_as_they_were(harness: Harness) -> None:
    (before,) = harness.run(harness.collect(PROMPT, 1, GREEDY))

    async def body() -> None:
        await harness.engine.pause("keep")
        await harness.receive(harness.folders[1])
        await harness.engine.discard_weights()
        with pytest.raises(EngineError, match="no weights were received"):
            await harness.engine.install_weights(1)
        await harness.engine.resume()

    harness.run(body())
    assert harness.engine.policy_version == 0
    (after,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    np.testing.assert_allclose(after.log_probs, before.log_probs, atol=1e-6)


def test_the_weights_that_are_there_count_as_the_version_they_are_set_to(harness: Harness) -> None:
    (before,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    harness.run(harness.engine.set_version(40))
    assert harness.engine.policy_version == 40
    (after,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    assert after.version_spans == ((40, 0, len(after.token_ids)),)
    harness.run(harness.update(harness.folders[1], 41))
    assert harness.engine.policy_version == 41


def test_invalidating_makes_the_version_unknown(harness: Harness) -> None:
    harness.run(harness.engine.invalidate())
    assert harness.engine.policy_version == -1
    (completion,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    assert completion.version_spans == ((-1, 0, len(completion.token_ids)),)


def _without(manifest: rollout_pb2.WeightManifest) -> str:
    name = manifest.tensors[3].name
    del manifest.tensors[3]
    return f"'{name}' is missing"


def _renamed(manifest: rollout_pb2.WeightManifest) -> str:
    manifest.tensors[2].name = "model.layers.7.mlp.up_proj.weight"
    return "'model.layers.7.mlp.up_proj.weight' is not a parameter"


def _reshaped(manifest: rollout_pb2.WeightManifest) -> str:
    tensor = next(t for t in manifest.tensors if t.name == "model.layers.1.mlp.up_proj.weight")
    tensor.shape[:] = [128, 256]
    return "'model.layers.1.mlp.up_proj.weight' has shape \\[128, 256\\]; allowed: \\[256, 128\\]"


def _twice(manifest: rollout_pb2.WeightManifest) -> str:
    manifest.tensors.add().CopyFrom(manifest.tensors[0])
    return f"'{manifest.tensors[0].name}' comes twice"


def _too_large(manifest: rollout_pb2.WeightManifest) -> str:
    manifest.bucket_bytes[0] += 2**40
    return "buckets hold"


def _outside(manifest: rollout_pb2.WeightManifest) -> str:
    manifest.tensors[0].offset = manifest.bucket_bytes[0]
    return f"'{manifest.tensors[0].name}'"


def _adapter(manifest: rollout_pb2.WeightManifest) -> str:
    manifest.kind = rollout_pb2.WEIGHT_KIND_LORA
    return "manifest.lora.r: got 0; allowed: at least 1"


@pytest.mark.parametrize("spoil", [_without, _renamed, _reshaped, _twice, _too_large, _outside, _adapter])
def test_weights_that_do_not_fit_are_refused_by_name(harness: Harness, spoil) -> None:
    manifest, _ = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
    harness.engine.check_manifest(manifest)
    words = spoil(manifest)
    with pytest.raises(ManifestError, match=words):
        harness.engine.check_manifest(manifest)
    with pytest.raises(ManifestError, match=words):
        harness.run(harness.engine.receive_weights(manifest, 5.0))


def test_receiving_outside_a_group_says_so(harness: Harness) -> None:
    harness.run(harness.engine.leave_weight_group())
    harness.left_group()
    manifest, _ = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
    with pytest.raises(EngineError, match="in no weight group"):
        harness.run(harness.engine.receive_weights(manifest, 5.0))


def test_a_transport_it_does_not_have_is_refused(harness: Harness) -> None:
    info = WeightGroupInfo("nccl", "127.0.0.1", 1, 1, 2, 5.0, b"", 1)
    with pytest.raises(EngineError, match="'nccl' is not available here; allowed: gloo, file"):
        harness.run(harness.engine.join_weight_group(info))
    harness.left_group()


def test_a_sender_killed_in_mid_broadcast_costs_one_transfer(harness: Harness) -> None:
    (before,) = harness.run(harness.collect(PROMPT, 1, GREEDY))

    async def body() -> float:
        await harness.join()
        await harness.engine.pause("keep")
        manifest, buckets = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
        assert len(buckets) > 2
        harness.sender.order(do="send_some", folder=str(harness.folders[1]), bucket_bytes=BUCKET_BYTES, buckets=1)
        receiving = asyncio.create_task(harness.engine.receive_weights(manifest, 200.0))
        await asyncio.to_thread(harness.sender.answer)
        begin = time.monotonic()
        harness.sender.kill()
        with pytest.raises(WeightTransferError, match="broadcast of weights failed"):
            await receiving
        await harness.engine.resume()
        return time.monotonic() - begin

    assert harness.run(body()) < 60.0
    harness.left_group()
    assert harness.engine.policy_version == 0
    (after,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    harness.run(harness.update(harness.folders[1], 1))  # The next epoch works.
    assert harness.engine.policy_version == 1


def test_a_sender_that_stalls_costs_the_deadline_and_no_more(harness: Harness) -> None:
    async def body() -> float:
        await harness.join()
        manifest, _ = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
        harness.sender.order(do="send_some", folder=str(harness.folders[1]), bucket_bytes=BUCKET_BYTES, buckets=1)
        begin = time.monotonic()
        with pytest.raises(WeightTransferError):
            await harness.engine.receive_weights(manifest, 1.0)
        return time.monotonic() - begin

    assert 0.9 < harness.run(body()) < 60.0
    harness.sender.kill()
    harness.left_group()
    assert len(harness.run(harness.collect(PROMPT, 2, GREEDY))) == 2
    assert harness.engine.policy_version == 0


def test_cancelling_a_transfer_leaves_the_group(harness: Harness) -> None:
    async def body() -> float:
        await harness.join()
        manifest, _ = pack(read_weights(harness.folders[1]), BUCKET_BYTES)
        receiving = asyncio.create_task(harness.engine.receive_weights(manifest, 200.0))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(EngineError, match="in no weight group"):
            await harness.engine.receive_weights(manifest, 20.0)
        return time.monotonic() - begin

    assert harness.run(body()) < 60.0
    harness.left_group()


def test_joining_where_nobody_is_costs_the_deadline(harness: Harness) -> None:
    harness.left_group()
    nobody = harness.sender.open(world_size=3, timeout=1.0)  # The third rank never comes.
    begin = time.monotonic()
    with pytest.raises(WeightTransferError, match="could not join the weight group"):
        harness.run(harness.engine.join_weight_group(nobody))
    assert time.monotonic() - begin < 60.0
    harness.sender.kill()
    harness.left_group()
