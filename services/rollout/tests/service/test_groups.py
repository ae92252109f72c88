"""The life of a prompt group, end to end through the service."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, rollout_pb2
from world import instance

from quartet_common.durations import to_seconds
from quartet_common.sampling import SamplingSection, given
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout import broker
from quartet_rollout.engines import EngineError


def failure(kind=reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, retryable=True) -> reward_pb2.Failure:
    return reward_pb2.Failure(kind=kind, message="it died", retryable=retryable)


def rows(ragged) -> list[list]:
    return [row.tolist() for row in decode_ragged(ragged)]


async def test_accuracy_is_that_of_the_completions_whose_answers_were_judged(world):
    world.reward.unjudged = "a"
    await world.put(instance())
    header, tensors = world.broker.puts[0].group.header, world.broker.tensors()
    assert (header.ans_acc, header.unjudged, header.reward_mean) == (0.5, 1, 3.5)
    assert decode(tensors.ans_judged).tolist() == [0, 1] and decode(tensors.ans_acc).tolist() == [0, 0.5]


async def test_a_group_is_generated_scored_and_put(world):
    world.engine.policy_version = 7
    before = time.time()
    await world.put(instance())

    header = world.broker.puts[0].group.header
    assert (header.instance_id, header.purpose) == ("pass-0/0", experience_pb2.PURPOSE_TRAIN)
    assert (header.min_policy_version, header.max_policy_version) == (7, 7)
    assert (header.completions, header.completion_tokens, header.attempt, header.unjudged) == (2, 3 + 4, 1, 0)
    assert (header.reward_mean, header.reward_std, header.ans_acc) == pytest.approx((3.5, 0.5**0.5, 0.5))

    tensors = world.broker.tensors()
    assert decode(tensors.prompt_token_ids).tolist() == [ord(character) for character in "1+1=?"]
    assert decode_ragged(tensors.completion_token_ids)[0].dtype == np.int32
    assert rows(tensors.completion_token_ids) == [[97] * 3, [98] * 4]
    assert rows(tensors.rollout_log_probs) == [[-0.5] * 3, [-1.5] * 4]
    assert rows(tensors.version_spans) == [[7, 0, 3], [7, 0, 4]]
    assert decode(tensors.rewards).tolist() == [3.0, 4.0]
    assert decode(tensors.temperatures).tolist() == [1.0, 1.0]
    assert decode(tensors.truncated).tolist() == [0, 0] and not tensors.HasField("loss_mask")
    assert not tensors.HasField("ans_judged")

    transcript = world.broker.transcript()
    assert transcript.instance.instance_id == "pass-0/0" and transcript.prompt_text == "1+1=?"
    assert transcript.rollout_id == world.host.instance_id
    for info, text, reward in zip(transcript.completions, ("aaa", "bbbb"), (3.0, 4.0), strict=True):
        assert (info.text, info.score.reward, info.turns, info.inserted_tokens) == (text, reward, 1, 0)
        assert info.finish_reason == experience_pb2.FINISH_REASON_STOP
        assert 0 < to_seconds(info.generated_after) <= to_seconds(info.scored_after)
    began, ended = (stamp.ToNanoseconds() / 1e9 for stamp in (transcript.started_at, transcript.finished_at))
    assert before <= began <= ended <= time.time()


async def test_completions_have_their_own_scores_in_whatever_order_they_finish(world):
    world.engine.length, world.engine.grows = 5, -2
    await world.put(instance(source="own"))
    assert world.broker.puts[0].group.header.source == "own"
    assert [item.completion for item in world.reward.items] == ["bbb", "aaaaa"]
    assert decode(world.broker.tensors().rewards).tolist() == [5.0, 3.0]
    verifiers = world.broker.puts[0].group.header.verifiers
    means = [(mean.name, mean.reward, mean.completions, mean.ans_acc, mean.judged) for mean in verifiers]
    assert means == [("length", 4.0, 2, 0.5, 2), ("none", 0.0, 0, 0.0, 0), ("length-2", -1.0, 2, 0.0, 0)]
    assert rows(world.broker.tensors().completion_token_ids) == [[97] * 5, [98] * 3]
    infos = world.broker.transcript().completions
    assert [(info.index, info.text, info.score.reward) for info in infos] == [(0, "aaaaa", 5.0), (1, "bbb", 3.0)]


async def test_a_training_group_carries_the_masks_of_a_run_that_wants_them(world):
    world.engine.gives_masks = True
    world.broker.create_run(sampling_masks=True)
    await world.put(instance())
    assert rows(world.broker.tensors().sampling_mask_counts) == [[0, 2, 2], [0, 2, 2, 2]]
    assert rows(world.broker.tensors().sampling_mask_token_ids) == [[97, 98] * 2, [98, 99] * 3]
    await world.put(instance("e", purpose=experience_pb2.PURPOSE_EVALUATE))
    assert not world.broker.tensors(1).HasField("sampling_mask_counts")
    world.engine.alter = lambda completion: replace(completion, mask=None)  # nothing was cut off
    await world.put(instance("n"))
    assert rows(world.broker.tensors(2).sampling_mask_counts) == [[0] * 3, [0] * 4]
    assert rows(world.broker.tensors(2).sampling_mask_token_ids) == [[], []]


async def test_a_training_group_carries_the_experts_of_a_run_that_wants_them(world):
    world.engine.takes = ["routed_experts"]
    world.broker.create_run(router_replay=True)

    def routed(completion):
        tokens = len("1+1=?") + completion.token_ids.size - 1
        experts = np.arange(tokens * 4).reshape(tokens, 2, 2) + 100 * completion.index
        return replace(completion, routed_experts=experts.astype(np.uint8))

    world.engine.alter = routed
    await world.put(instance())
    tensors = world.broker.tensors()
    prompt = decode(tensors.prompt_token_ids).size
    assert prompt == len("1+1=?")
    assert decode(tensors.prompt_routed_experts).tolist() == np.arange(prompt * 4).reshape(prompt, 2, 2).tolist()
    first, second = rows(tensors.completion_routed_experts)
    assert first == [*range(prompt * 4, prompt * 4 + 2 * 4)]
    assert second == [100 + each for each in range(prompt * 4, prompt * 4 + 3 * 4)]


@pytest.mark.parametrize(
    "wanted", [{"router_replay": True}, {"evaluation_sampling": experience_pb2.SamplingParams(bad_words=["no"])}]
)
async def test_a_rollout_whose_engine_cannot_do_what_a_run_wants_stays_away(world, wanted):
    world.broker.create_run(**wanted)
    await world.start()
    await world.until(lambda: world.host.exit_code == 1)
    assert "register" not in world.broker.calls


async def test_a_group_carries_what_it_was_drawn_by(world):
    world.broker.create_run(sampling=experience_pb2.SamplingParams(top_k=5, max_new_tokens=8))
    await world.put(instance(prompt=experience_pb2.Prompt(text="x", sampling={"top_p": 0.5, "stop": ["z"]})))
    sampling = SamplingSection(**given(world.broker.tensors().sampling))
    assert sampling == SamplingSection(top_k=5, top_p=0.5, max_new_tokens=8, stop=("z",), n=2)


async def test_parameters_that_the_engine_does_not_take_are_never_left_out(world):
    prompt = experience_pb2.Prompt(text="x", sampling={"min_tokens": 2})
    release = await world.release(instance(prompt=prompt))
    assert "sampling.min_tokens is 2, which this rollout's engine does not take" in release.failure
    world.engine.takes = ["sampling.min_tokens"]
    await world.put(instance("again", prompt=prompt))
    assert [request[3].min_tokens for request in world.engine.requests] == [2]


async def test_completions_aborted_by_an_update_are_generated_again_side_by_side(world):
    world.engine.hold(2)
    await world.start()
    await world.broker.submit(instance())
    await world.until(lambda: world.engine.tokens_total == 4)
    await world.load(version=1, pause_mode=rollout_pb2.PAUSE_MODE_ABORT)
    await world.until(lambda: len(world.engine.requests) == 3)
    world.engine.let_go()
    await world.broker.until(lambda: world.broker.puts)
    infos = world.broker.transcript().completions
    assert [info.index for info in infos] == [0, 1]
    assert {info.finish_reason for info in infos} == {experience_pb2.FINISH_REASON_STOP}


async def test_a_reference_that_cannot_be_used_sets_the_prompt_aside_and_nothing_is_kept(world):
    world.reward.failures = [failure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, retryable=False)]
    release = await world.release(instance())
    assert "it died" in release.failure and release.permanent and not release.unscored
    assert not world.broker.puts


async def test_a_passing_verifier_failure_is_tried_again(world):
    world.reward.failures = [failure(99), failure(reward_pb2.FAILURE_KIND_SHUT_DOWN)]  # 99: of a later release
    await world.start(scoring={"attempts": 2, "backoff_seconds": 0.01})
    await world.put(instance())
    assert world.broker.puts[0].group.header.reward_mean == pytest.approx(3.5)
    assert len({item.item_id for item in world.reward.items}) == len(world.reward.items) == 4


async def test_completions_that_finish_together_are_scored_by_one_message(world):
    names = {f"i{number}" for number in range(20)}
    await world.start(max_running_completions=100)
    await world.put(*map(instance, names))
    assert {put.group.header.instance_id for put in world.broker.puts} == names
    assert {put.group.header.reward_mean for put in world.broker.puts} == {3.5}
    assert sum(world.reward.messages) == 40 and len(world.reward.messages) <= 10


async def test_score_items_carry_what_verifiers_need(world):
    prompt = instance(text="x" * 10)
    prompt.prompt.sampling.max_new_tokens = 3
    await world.put(prompt)
    first, second = sorted(world.reward.items, key=lambda item: item.completion)
    assert (first.completion, first.completion_tokens, first.truncated) == ("aaa", 3, False)
    assert (second.completion, second.completion_tokens, second.truncated) == ("bbb", 3, True)
    assert first.max_new_tokens == 3 and first.run_id == "demo" and first.reference.answer == "2"
    assert [spec.name for spec in first.verifiers] == ["exact"]
    assert first.prompt == second.prompt == "x" * 10
    assert decode(world.broker.tensors().truncated).tolist() == [0, 1]


async def test_a_group_that_is_not_wanted_is_let_go(world):
    outcomes = [broker_pb2.PUT_OUTCOME_LEASE_LOST, broker_pb2.PUT_OUTCOME_STALE, broker_pb2.PUT_OUTCOME_DUPLICATE]
    world.broker.outcomes = list(outcomes)
    await world.start()
    await world.broker.submit(*(instance(f"{n}") for n in range(len(outcomes) + 1)))
    await world.broker.until(lambda: world.broker.puts)
    await world.until(lambda: len(world.service.groups) == 0)
    assert not world.broker.releases and len(world.broker.puts) == 1 and not world.broker.outcomes


async def test_a_group_without_room_is_put_again(world, monkeypatch):
    monkeypatch.setattr(broker, "_NO_ROOM_SECONDS", 0.01)
    world.broker.outcomes = [broker_pb2.PUT_OUTCOME_NO_ROOM, broker_pb2.PUT_OUTCOME_NO_ROOM]
    await world.put(instance())
    assert world.broker.calls.count("put 1") == 3


async def test_a_renewal_between_an_accepted_upload_and_its_answer_cancels_nothing(world, monkeypatch):
    world.broker.run.spec.prompt_lease_ttl.CopyFrom(Duration(nanos=300_000_000))
    calls, note = world.broker.calls, world.broker._note

    async def note_after_renewals(call: str) -> None:
        if call == "put 1":  # the second begins when the answer to the first has been processed
            wanted = calls.count("renew") + 2
            await world.until(lambda: calls.count("renew") >= wanted or not world.service.groups)
        await note(call)

    monkeypatch.setattr(world.broker, "_note", note_after_renewals)
    await world.put(instance())
    await world.until(lambda: not world.service.groups)
    assert world.service.state.groups_total == 1


@pytest.mark.parametrize(
    ("run", "prompt", "words"),
    [
        ({}, {"text": "x" * 60}, ("60 tokens", "at most 56", "context of 64")),
        ({"max_prompt_tokens": 4}, {"text": "1+1=?"}, ("5 tokens", "at most 4")),
        ({}, {"text": "x", "sampling": {"temperature": 0}}, ("sampling.temperature: got 0.0; allowed: above 0",)),
    ],
    ids=["longer than the context", "longer than the run allows", "greedy"],
)
async def test_a_training_prompt_that_cannot_be_used_is_set_aside_with_the_reason(world, run, prompt, words):
    world.broker.create_run(**run)
    release = await world.release(instance(prompt=experience_pb2.Prompt(**prompt)))
    assert release.permanent and all(word in release.failure for word in words)
    assert not world.engine.requests


async def test_log_probs_that_are_not_finite_are_not_put(world):
    world.engine.alter = lambda one: replace(one, log_probs=np.full_like(one.log_probs, np.nan))
    release = await world.release(instance())
    assert not release.permanent and release.failure == "the engine gave log-probs that are not finite"
    assert not world.broker.puts


async def test_an_engine_that_fails_ends_the_service(world):
    world.engine.errors["generate"] = EngineError("out of memory")
    assert "out of memory" in (await world.release(instance())).failure
    await world.until(world.host.stopping.is_set)
    assert await world.stop() == 1


async def test_verifiers_read_the_message_that_completions_continue(world):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "I think "}]
    prompt = experience_pb2.Prompt(chat={"messages": turns}, reference=reward_pb2.Reference(answer="2"))
    await world.put(instance(prompt=prompt))
    item = min(world.reward.items, key=lambda item: item.completion)
    assert item.completion == "I think aaa" and item.completion_tokens == 3
    assert item.prompt.endswith("[assistant]") and json.loads(item.messages) == turns[:1]
    assert world.broker.transcript().prompt_text.endswith("[assistant]I think ")
    assert world.broker.transcript().completions[0].text == "aaa"


async def test_equal_prompts_and_passes_get_other_noise_and_evaluations_the_same(world):
    async def seed_of(name: str, **fields) -> int:
        made = instance(name, **fields)
        made.prompt.sampling.seed = 5
        await world.put(made)
        return world.engine.requests[-1][3].seed

    names = [f"pass-{data_pass}/{place}" for data_pass in (0, 1) for place in (0, 1)]
    seeds = [await seed_of(name) for name in names]
    assert len(set(seeds)) == 4 and min(seeds) >= 0 and max(seeds) < 2**62
    evaluation = {"purpose": experience_pb2.PURPOSE_EVALUATE}
    first = await seed_of("heldout/0@3", evaluation_id="heldout@3", **evaluation)
    assert first == await seed_of("heldout/0@4", evaluation_id="heldout@4", **evaluation)
    assert first != await seed_of("heldout/1@4", evaluation_id="heldout@4", **evaluation)
    assert await seed_of("served", purpose=experience_pb2.PURPOSE_SERVE) == 5


async def test_serving_prompts_without_reference_are_not_scored(world):
    prompt = experience_pb2.Prompt(text="hello")
    await world.put(instance(purpose=experience_pb2.PURPOSE_SERVE, prompt=prompt))
    assert not world.reward.items
    info = world.broker.transcript().completions[0]
    assert not info.HasField("score") and not info.HasField("scored_after") and info.HasField("generated_after")
    assert not world.broker.tensors().HasField("rewards")


async def test_an_evaluation_draws_one_completion_by_its_own_sampling(world):
    world.broker.create_run(evaluation_sampling=experience_pb2.SamplingParams(temperature=0.25))
    world.engine.policy_version = 3
    await world.put(instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=3))
    _, _, n, sampling = world.engine.requests[0]
    assert n == 1 and sampling.temperature == 0.25 and sampling.max_new_tokens == 8
    assert world.broker.puts[0].group.header.reward_std == 0.0


async def test_a_pinned_group_that_a_weight_update_crossed_is_given_back(world):
    await world.cross(instance(purpose=experience_pb2.PURPOSE_EVALUATE, pinned_version=0), tokens=2)
    assert not world.broker.releases[0].failure and not world.broker.puts
