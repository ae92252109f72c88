"""Groups whose verifier fails: set aside with their completions, and scored when they come again; never drawn again."""

import grpc
import numpy as np
import pytest
from conftest import instance
from quartet.v1 import experience_pb2

from quartet_common.tensors import decode, decode_ragged

FAST = {"attempts": 3, "backoff_seconds": 0.01}


async def test_all_completions_are_kept_as_they_are_with_the_scores_that_were_found(world):
    world.reward.raises_on = "b"
    await world.start(scoring=FAST)
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    (release,) = world.broker.releases
    assert release.permanent, "no other completions may be drawn"
    assert release.failure.endswith("raised KeyError: 'b' (own.py:7) (attempt 3 of 3)")
    assert sorted(item.completion for item in world.reward.items) == ["aaa", "bbbb", "bbbb", "bbbb"]

    kept = experience_pb2.UnscoredGroup.FromString(release.unscored)
    assert kept.group.header.reward_mean == 0 and not kept.group.header.reward_std
    tensors = experience_pb2.GroupTensors.FromString(kept.group.tensors)
    assert [row.tolist() for row in decode_ragged(tensors.completion_token_ids)] == [[97] * 3, [98] * 4]
    assert not tensors.HasField("rewards") and not tensors.HasField("ans_acc")
    first, second = experience_pb2.GroupTranscript.FromString(kept.group.transcript).completions
    assert (first.text, first.score.reward, second.text, second.HasField("score")) == ("aaa", 3.0, "bbbb", False)
    assert [item.completion for item in kept.items] == ["aaa", "bbbb"]


async def test_kept_completions_are_scored_by_a_mended_verifier_without_drawing(world):
    world.reward.raises_on = "b"
    await world.start(scoring=FAST)
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    await world.load(version=4)  # the weights have moved on
    world.reward.raises_on = ""
    world.reward.items.clear()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)
    assert len(world.engine.requests) == 1, "nothing was drawn"
    assert sorted(item.completion for item in world.reward.items) == ["aaa", "bbbb"], "all by one verifier"
    header = world.broker.puts[0].group.header
    assert (header.min_policy_version, header.attempt) == (0, 2)
    assert header.reward_mean == 3.5 and header.reward_std == pytest.approx(np.std([3, 4], ddof=1))
    tensors = world.broker.tensors()
    assert decode(tensors.rewards).tolist() == [3.0, 4.0] and decode(tensors.ans_acc).tolist() == [0.5, 0.5]
    assert [row.tolist() for row in decode_ragged(tensors.rollout_log_probs)] == [[-0.5] * 3, [-1.5] * 4]
    completions = world.broker.transcript().completions
    assert [info.score.reward for info in completions] == [3.0, 4.0]
    assert all(info.HasField("generated_after") and not info.HasField("scored_after") for info in completions)


async def test_an_evaluation_s_completions_are_scored_whatever_version_the_weights_are(world):
    world.reward.raises_on = "a"
    pinned = instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=0)
    await world.start(scoring=FAST)
    await world.broker.submit(pinned)
    await world.broker.until(lambda: world.broker.releases)
    await world.load(version=1)
    world.reward.raises_on = ""
    await world.broker.submit(pinned)
    await world.broker.until(lambda: world.broker.puts)
    header = world.broker.puts[0].group.header
    assert (header.min_policy_version, header.max_policy_version) == (0, 0) and len(world.engine.requests) == 1


async def test_a_verifier_that_still_raises_sets_them_aside_again(world):
    world.reward.raises_on = "b"
    await world.start(scoring=FAST)
    for count in (1, 2):
        await world.broker.submit(instance())
        await world.broker.until(lambda count=count: len(world.broker.releases) == count)
    first, second = (experience_pb2.UnscoredGroup.FromString(each.unscored) for each in world.broker.releases)
    assert first.group.tensors == second.group.tensors and len(world.engine.requests) == 1


async def test_a_verifier_that_does_not_answer_is_one_that_fails(world):
    world.reward.silent = True
    await world.start(scoring={"attempts": 1, "timeout_seconds": 0.1})
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    (release,) = world.broker.releases
    assert "no answer within 0.1 s" in release.failure and release.permanent and release.unscored


async def test_the_engine_is_free_while_scoring_is_tried_again(world):
    world.reward.raises_on = "b"
    await world.start(scoring={"attempts": 20, "backoff_seconds": 60}, max_running_completions=2)
    await world.broker.submit(instance("a"), instance("b"), instance("c"))
    await world.until(lambda: len(world.engine.requests) == 3)
    assert not world.broker.releases


async def test_where_a_verifier_raised_is_told_once_and_at_once(world):
    world.reward.raises_on = "b"
    await world.start(scoring={"attempts": 20, "backoff_seconds": 60})
    await world.broker.submit(instance("a"), instance("b"))
    await world.broker.until(lambda: world.broker.notices)
    await world.until(lambda: len(world.reward.items) == 4)
    (notice,) = world.broker.notices
    assert (notice.level, notice.text) == ("error", "verifier 'exact' raised KeyError: 'b' (own.py:7)\nTraceback")
    assert not world.broker.releases


async def test_a_broker_that_is_away_gets_the_completions_when_it_is_back(world, monkeypatch):
    world.reward.raises_on = "b"
    await world.start(scoring=FAST)
    call, refused = world.service._link.call, []

    async def away(method, request, timeout=None):
        if method == "ReleaseLeases" and len(refused) < 2:
            refused.append(request)
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return await call(method, request, timeout)

    monkeypatch.setattr(world.service._link, "call", away)
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    assert len(refused) == 2 and world.broker.releases[0].unscored
