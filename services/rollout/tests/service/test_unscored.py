"""Groups whose verifier fails: set aside with their completions, and scored when they come again; never drawn again."""

import numpy as np
import pytest
from quartet.v1 import experience_pb2, reward_pb2
from world import instance

from quartet_common.tensors import decode, decode_ragged
from quartet_rollout import scoring

FAST = {"attempts": 3, "backoff_seconds": 0.01}
SLOW = {"attempts": 20, "backoff_seconds": 60}


@pytest.fixture
async def failing(world):
    """A world whose verifier raises on the second completion."""
    world.reward.raises_on = "b"
    await world.start(scoring=FAST)
    return world


async def test_all_completions_are_kept_as_they_are_with_the_scores_that_were_found(failing):
    release = await failing.release(instance())
    assert release.permanent, "no other completions may be drawn"
    assert release.failure.endswith("raised KeyError: 'b' (own.py:7) (attempt 3 of 3)")
    assert sorted(item.completion for item in failing.reward.items) == ["aaa", "bbbb", "bbbb", "bbbb"]

    kept = experience_pb2.UnscoredGroup.FromString(release.unscored)
    assert kept.group.header.reward_mean == 0 and not kept.group.header.reward_std
    tensors = experience_pb2.GroupTensors.FromString(kept.group.tensors)
    assert [row.tolist() for row in decode_ragged(tensors.completion_token_ids)] == [[97] * 3, [98] * 4]
    assert not tensors.HasField("rewards") and not tensors.HasField("ans_acc")
    first, second = experience_pb2.GroupTranscript.FromString(kept.group.transcript).completions
    assert (first.text, first.score.reward, second.text, second.HasField("score")) == ("aaa", 3.0, "bbbb", False)
    assert [item.completion for item in kept.items] == ["aaa", "bbbb"]


async def test_kept_completions_are_scored_by_a_mended_verifier_without_drawing(failing):
    await failing.release(instance())
    await failing.load(version=4)  # the weights have moved on
    failing.reward.raises_on = ""
    failing.reward.items.clear()
    await failing.put(instance())
    assert len(failing.engine.requests) == 1, "nothing was drawn"
    assert sorted(item.completion for item in failing.reward.items) == ["aaa", "bbbb"], "all by one verifier"
    header = failing.broker.puts[0].group.header
    assert (header.min_policy_version, header.attempt) == (0, 2)
    assert header.reward_mean == 3.5 and header.reward_std == pytest.approx(np.std([3, 4], ddof=1))
    tensors = failing.broker.tensors()
    assert decode(tensors.rewards).tolist() == [3.0, 4.0] and decode(tensors.ans_acc).tolist() == [0.5, 0.5]
    assert [row.tolist() for row in decode_ragged(tensors.rollout_log_probs)] == [[-0.5] * 3, [-1.5] * 4]
    assert [info.score.reward for info in failing.broker.transcript().completions] == [3.0, 4.0]


async def test_a_verifier_that_does_not_answer_is_one_that_fails(world, monkeypatch):
    monkeypatch.setattr(scoring, "_SWEEP_SECONDS", 0.05)
    world.reward.silent = True
    await world.start(scoring={"attempts": 1, "timeout_seconds": 0.1})
    release = await world.release(instance())
    assert "no answer within 0.1 s" in release.failure and release.permanent and release.unscored


async def test_meanwhile_the_engine_is_free_and_where_it_raised_is_told_once(world):
    world.reward.raises_on = "b"
    await world.start(scoring=SLOW, max_running_completions=2)
    await world.broker.submit(instance("a"), instance("b"), instance("c"))
    await world.until(lambda: len(world.reward.items) == 6)
    await world.broker.until(lambda: world.broker.notices)
    (notice,) = world.broker.notices
    assert (notice.level, notice.text) == ("error", "verifier 'exact' raised KeyError: 'b' (own.py:7)\nTraceback")
    assert not world.broker.releases


async def test_a_verifier_that_takes_too_long_is_told_once_at_its_first_failure(world):
    crashed = reward_pb2.Failure(kind=reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, message="took too long", retryable=True)
    world.reward.failures = [crashed] * 3
    await world.start(scoring={"attempts": 20, "backoff_seconds": 0.01})
    await world.put(instance())
    assert [(notice.level, notice.text) for notice in world.broker.notices] == [("error", "took too long")]
