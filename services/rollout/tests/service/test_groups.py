"""The life of a prompt group, end to end through the service."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import begin_request, finish_request, instance, join_request
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, rollout_pb2

from quartet_common.durations import to_seconds
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout import scoring
from quartet_rollout.engines import EngineError
from quartet_rollout.scoring import BATCHES


def failure(kind=reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, retryable=True) -> reward_pb2.Failure:
    return reward_pb2.Failure(kind=kind, message="it died", retryable=retryable)


async def test_a_group_is_generated_scored_and_put(world):
    world.engine.policy_version = 7
    before = time.time()
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)

    header = world.broker.puts[0].group.header
    assert header.instance_id == "pass-0/0" and header.purpose == experience_pb2.PURPOSE_TRAIN
    assert (header.min_policy_version, header.max_policy_version) == (7, 7)
    assert (header.completions, header.completion_tokens, header.attempt) == (2, 3 + 4, 1)
    assert header.reward_mean == pytest.approx(3.5)
    assert header.reward_std == pytest.approx(np.std([3, 4], ddof=1))
    assert header.ans_acc == pytest.approx(0.5)

    tensors = world.broker.tensors()
    assert decode(tensors.prompt_token_ids).tolist() == [ord(character) for character in "1+1=?"]
    tokens = decode_ragged(tensors.completion_token_ids)
    assert [row.tolist() for row in tokens] == [[97] * 3, [98] * 4] and tokens[0].dtype == np.int32
    assert [row.tolist() for row in decode_ragged(tensors.rollout_log_probs)] == [[-0.5] * 3, [-1.5] * 4]
    assert decode(tensors.rewards).tolist() == [3.0, 4.0]
    assert decode(tensors.temperatures).tolist() == [1.0, 1.0]
    assert decode(tensors.truncated).tolist() == [0, 0]
    assert [row.tolist() for row in decode_ragged(tensors.version_spans)] == [[7, 0, 3], [7, 0, 4]]

    transcript = world.broker.transcript()
    assert transcript.instance.instance_id == "pass-0/0" and transcript.prompt_text == "1+1=?"
    assert transcript.rollout_id == world.host.instance_id
    assert [info.text for info in transcript.completions] == ["aaa", "bbbb"]
    assert [info.score.reward for info in transcript.completions] == [3.0, 4.0]
    assert transcript.completions[0].finish_reason == experience_pb2.FINISH_REASON_STOP

    began, ended = (stamp.ToNanoseconds() / 1e9 for stamp in (transcript.started_at, transcript.finished_at))
    assert before <= began <= ended <= time.time()
    for info in transcript.completions:
        assert 0 < to_seconds(info.generated_after) <= to_seconds(info.scored_after)


async def test_a_training_group_carries_the_masks_of_a_run_that_wants_them(world):
    world.engine.gives_masks = True
    world.broker.create_run(sampling_masks=True)
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)
    tensors = world.broker.tensors()
    assert [row.tolist() for row in decode_ragged(tensors.sampling_mask_counts)] == [[0, 2, 2], [0, 2, 2, 2]]
    assert [row.tolist() for row in decode_ragged(tensors.sampling_mask_token_ids)] == [[97, 98] * 2, [98, 99] * 3]

    await world.broker.submit(instance("e", purpose=experience_pb2.PURPOSE_EVALUATE))
    await world.broker.until(lambda: len(world.broker.puts) == 2)
    assert not world.broker.tensors(1).HasField("sampling_mask_counts")


async def test_where_nothing_is_cut_off_the_masks_say_so(world):
    world.engine.gives_masks = True
    world.broker.create_run(sampling_masks=True)
    generate = world.engine.generate

    async def without(*request):
        async for completion in generate(*request):
            yield replace(completion, mask=None)

    world.engine.generate = without
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)
    tensors = world.broker.tensors()
    assert [row.tolist() for row in decode_ragged(tensors.sampling_mask_counts)] == [[0] * 3, [0] * 4]
    assert [row.tolist() for row in decode_ragged(tensors.sampling_mask_token_ids)] == [[], []]


async def test_a_rollout_that_cannot_tell_masks_leaves_a_run_that_wants_them(world):
    world.broker.create_run(sampling_masks=True)
    await world.start()
    await world.until(lambda: world.host.exit_code == 1)
    assert world.broker.left and not world.broker.members


async def test_tokens_of_two_versions_are_told_apart(world):
    world.engine.hold(2)
    await world.start()
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.tokens_total == 4)
    await world.load(version=1)
    world.engine.let_go()
    await world.broker.until(lambda: world.broker.puts)
    header = world.broker.puts[0].group.header
    assert (header.min_policy_version, header.max_policy_version) == (0, 1)
    for info in world.broker.transcript().completions:
        assert [span.policy_version for span in info.version_spans] == [0, 1]
        assert info.version_spans[0].end == info.version_spans[1].begin == 2
        assert info.version_spans[1].end == info.tokens


async def test_completions_aborted_by_an_update_are_generated_again(world):
    world.engine.hold(2)
    await world.start()
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.tokens_total == 4)
    await world.stub.JoinWeightGroup(join_request(), timeout=10)
    await world.stub.BeginWeightUpdate(begin_request(1, pause_mode=rollout_pb2.PAUSE_MODE_ABORT), timeout=10)
    await world.stub.FinishWeightUpdate(finish_request(1), timeout=10)
    world.engine.let_go()
    await world.broker.until(lambda: world.broker.puts)
    infos = world.broker.transcript().completions
    assert [info.index for info in infos] == [0, 1]
    assert {info.finish_reason for info in infos} == {experience_pb2.FINISH_REASON_STOP}


async def test_a_reference_that_cannot_be_used_sets_the_prompt_aside_and_nothing_is_kept(world):
    world.reward.failures = [failure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, retryable=False)]
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    (release,) = world.broker.releases
    assert "it died" in release.failure and release.permanent and not release.unscored
    assert not world.broker.puts


async def test_a_passing_verifier_failure_is_tried_again(world):
    world.reward.failures = [failure(99), failure(reward_pb2.FAILURE_KIND_SHUT_DOWN)]  # 99: of a later release
    await world.start(scoring={"attempts": 2, "backoff_seconds": 0.01})
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)
    assert world.broker.puts[0].group.header.reward_mean == pytest.approx(3.5)
    assert len({item.item_id for item in world.reward.items}) == len(world.reward.items) == 4


@pytest.mark.parametrize("batches", [True, False])
async def test_a_broken_score_stream_loses_nothing(world, batches):
    if not batches:
        world.reward_host.capabilities.remove(BATCHES)
    world.reward.break_streams.set()
    await world.start()
    await world.broker.submit(instance("a"), instance("b"))
    await world.broker.until(lambda: len(world.broker.puts) == 2)


async def test_completions_that_finish_together_are_scored_by_one_message(world):
    await world.start(max_running_completions=100)
    names = [f"i{number}" for number in range(20)]
    await world.broker.submit(*(instance(name) for name in names))
    await world.broker.until(lambda: len(world.broker.puts) == 20)
    assert {put.group.header.instance_id for put in world.broker.puts} == set(names)
    assert {put.group.header.reward_mean for put in world.broker.puts} == {3.5}
    assert sum(world.reward.messages) == 40 and len(world.reward.messages) <= 10


async def test_a_message_of_long_completions_is_sent_before_it_is_too_long(world, monkeypatch):
    monkeypatch.setattr(scoring, "_MOST_BYTES", 50)
    await world.start(max_running_completions=100)
    await world.broker.submit(*(instance(f"i{number}", text="x" * 40) for number in range(5)))
    await world.broker.until(lambda: len(world.broker.puts) == 5)
    assert world.reward.messages == [1] * 10


async def test_a_reward_service_of_the_last_release_is_sent_single_items(world):
    world.reward_host.capabilities.remove(BATCHES)
    await world.start(max_running_completions=100)
    await world.broker.submit(*(instance(f"i{number}") for number in range(5)))
    await world.broker.until(lambda: len(world.broker.puts) == 5)
    assert world.reward.messages == [1] * 10 and not any(item.item_id == "" for item in world.reward.items)


async def test_items_that_wait_to_be_sent_survive_the_stream(world, monkeypatch):
    monkeypatch.setattr(scoring, "_GATHER_SECONDS", 0.5)
    await world.start()
    await world.broker.submit(instance("a"))
    await world.until(lambda: world.service._scorer._sent)
    await world.reward_host.server.stop(0)  # the stream breaks while they are gathered
    await world.until(lambda: not world.service._scorer._sent and world.service._scorer._unsent.qsize() == 2)


async def test_an_unanswered_item_is_given_up_in_time(world):
    world.reward.silent = True
    await world.start(scoring={"attempts": 1, "timeout_seconds": 0.1})
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    assert "no answer within 0.1 s" in world.broker.releases[0].failure


async def test_score_items_carry_what_verifiers_need(world):
    await world.start()
    prompt = instance(text="x" * 10)
    prompt.prompt.sampling.max_new_tokens = 3
    await world.broker.submit(prompt)
    await world.broker.until(lambda: world.broker.puts)
    first, second = sorted(world.reward.items, key=lambda item: item.completion)
    assert (first.completion, first.completion_tokens, first.truncated) == ("aaa", 3, False)
    assert (second.completion, second.completion_tokens, second.truncated) == ("bbb", 3, True)
    assert first.max_new_tokens == 3 and first.run_id == "demo" and first.reference.answer == "2"
    assert [spec.name for spec in first.verifiers] == ["exact"]
    assert first.prompt == second.prompt == "x" * 10
    assert decode(world.broker.tensors().truncated).tolist() == [0, 1]


async def test_a_lost_lease_stops_the_work(world):
    world.broker.run.spec.prompt_lease_ttl.seconds = 0
    world.broker.run.spec.prompt_lease_ttl.nanos = 300_000_000
    world.engine.unpaused.clear()  # generation hangs
    await world.start()
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.requests)
    world.broker.lost.add("lease-1")
    await world.until(lambda: not world.service._groups._groups)
    assert world.engine.running == 0
    assert not world.broker.puts and not world.broker.releases


@pytest.mark.parametrize(
    "outcome", [broker_pb2.PUT_OUTCOME_LEASE_LOST, broker_pb2.PUT_OUTCOME_STALE, broker_pb2.PUT_OUTCOME_DUPLICATE]
)
async def test_a_group_that_is_not_wanted_is_let_go(world, outcome):
    world.broker.outcomes = [outcome]
    await world.start()
    await world.broker.submit(instance("a"))
    await world.broker.submit(instance("b"))
    await world.broker.until(lambda: world.broker.puts)
    await world.until(lambda: len(world.service._keeper) == 0)
    assert not world.broker.releases and len(world.broker.puts) == 1


async def test_a_group_without_room_is_put_again(world):
    world.broker.outcomes = [broker_pb2.PUT_OUTCOME_NO_ROOM, broker_pb2.PUT_OUTCOME_NO_ROOM]
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.puts)
    assert world.broker.calls.count("put 1") == 3


async def test_a_prompt_longer_than_the_context_is_set_aside_with_the_lengths(world):
    await world.start()
    await world.broker.submit(instance(text="x" * 60))
    await world.broker.until(lambda: world.broker.releases)
    release = world.broker.releases[0]
    assert release.permanent
    assert "60 tokens" in release.failure and "at most 56" in release.failure and "context of 64" in release.failure
    assert not world.engine.requests


async def test_a_prompt_longer_than_the_run_allows_is_set_aside(world):
    world.broker.create_run(max_prompt_tokens=4)
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    assert "5 tokens" in world.broker.releases[0].failure and "at most 4" in world.broker.releases[0].failure


@pytest.mark.parametrize("own", [True, False])
async def test_a_training_prompt_that_would_be_drawn_greedily_is_set_aside(world, own):
    prompt = instance()
    (prompt.prompt if own else world.broker.run.spec).sampling.temperature = 0
    await world.start()
    await world.broker.submit(prompt)
    await world.broker.until(lambda: world.broker.releases)
    (release,) = world.broker.releases
    assert release.permanent and "sampling.temperature: got 0.0; allowed: above 0" in release.failure
    assert not world.engine.requests


async def test_log_probs_that_are_not_finite_are_not_put(world):
    generate = world.engine.generate

    async def without(*request):
        async for completion in generate(*request):
            yield replace(completion, log_probs=np.full_like(completion.log_probs, np.nan))

    world.engine.generate = without
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    (release,) = world.broker.releases
    assert not release.permanent and release.failure == "the engine gave log-probs that are not finite"
    assert not world.broker.puts


async def test_a_chat_is_rendered_with_the_system_prompt(world):
    world.broker.create_run(system_prompt="be brief")
    await world.start()
    chat = experience_pb2.Chat(messages=[experience_pb2.Message(role="user", content="hi")])
    await world.broker.submit(instance(prompt=experience_pb2.Prompt(chat=chat, reference={"answer": "2"})))
    await world.broker.until(lambda: world.broker.puts)
    assert world.broker.transcript().prompt_text == "[system]be brief[user]hi[assistant]"


async def test_an_engine_that_fails_ends_the_service(world):
    world.engine.generate_error = EngineError("out of memory")
    await world.start()
    await world.broker.submit(instance())
    await world.broker.until(lambda: world.broker.releases)
    assert "out of memory" in world.broker.releases[0].failure
    await world.until(world.host.stopping.is_set)
    assert await world.stop() == 1


async def test_serving_prompts_without_reference_are_not_scored(world):
    await world.start()
    prompt = experience_pb2.Prompt(text="hello")
    await world.broker.submit(instance(purpose=experience_pb2.PURPOSE_SERVE, prompt=prompt))
    await world.broker.until(lambda: world.broker.puts)
    assert not world.reward.items
    info = world.broker.transcript().completions[0]
    assert not info.HasField("score") and not info.HasField("scored_after") and info.HasField("generated_after")
    assert not world.broker.tensors().HasField("rewards")


async def test_an_evaluation_draws_one_completion_by_its_own_sampling(world):
    world.broker.create_run(evaluation_sampling=experience_pb2.SamplingParams(temperature=0.25))
    world.engine.policy_version = 3
    await world.start()
    await world.broker.submit(instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=3))
    await world.broker.until(lambda: world.broker.puts)
    _, _, n, sampling = world.engine.requests[0]
    assert n == 1 and sampling.temperature == 0.25 and sampling.max_new_tokens == 8
    assert world.broker.puts[0].group.header.reward_std == 0.0


async def test_a_pinned_group_that_a_weight_update_crossed_is_given_back(world):
    world.engine.hold(2)
    await world.start()
    await world.broker.submit(instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=0))
    await world.until(lambda: world.engine.tokens_total == 2)
    await world.load(version=1)
    world.engine.let_go()
    await world.broker.until(lambda: world.broker.releases)
    assert not world.broker.releases[0].failure and not world.broker.puts


async def test_leasing_follows_the_policy_version_without_delay(world):
    await world.start(lease_wait_seconds=30.0)
    await world.broker.until(lambda: "register" in world.broker.calls)
    await world.until(lambda: world.broker.lease_versions == [0])
    await world.load(version=1)
    # Both well before the first request ends.
    await world.until(lambda: 1 in world.broker.lease_versions, timeout=15)
    await world.broker.submit(instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=1))
    await world.broker.until(lambda: world.broker.puts, timeout=14)


async def test_no_more_is_leased_than_there_is_room_for(world):
    world.engine.unpaused.clear()
    await world.start(max_running_completions=4, max_unsettled_completions=8)
    await world.broker.submit(*(instance(f"i{number}") for number in range(20)))
    await world.until(lambda: world.engine.running == 4)
    await asyncio.sleep(1.0)
    assert world.engine.running == 4 and len(world.broker.leases) == 2
    world.engine.unpaused.set()
    await world.broker.until(lambda: len(world.broker.puts) == 20)
