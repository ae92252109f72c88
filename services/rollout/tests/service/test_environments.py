"""Completions of several turns, end to end through the service; the engine is scripted, the environments are real."""

import asyncio
import math
from dataclasses import replace

import grpc
import numpy as np
import pytest
from environments_under_test import WAITING, Broken, Echo
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import experience_pb2, rollout_pb2
from world import instance, refused

from quartet_common.config import ConfigError, ModelSection, RunSection, load_config
from quartet_common.run_spec import environment_spec
from quartet_common.sections import EnvironmentSection
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout.config import RolloutSection
from quartet_rollout.environments import episode, registry
from quartet_rollout.metrics import ENVIRONMENT_TIMEOUTS
from quartet_rollout.preflight import preflight


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The environments of the tests, as if a package had brought them."""
    Echo.episodes.clear()
    monkeypatch.setattr(registry, "_BUILT_IN", (*registry._BUILT_IN, Echo, Broken))


def environment(name: str = "echo", **fields) -> experience_pb2.EnvironmentSpec:
    parameters = fields.pop("parameters", {})
    spec = experience_pb2.EnvironmentSpec(name=name, **fields)
    spec.parameters.update(parameters)
    return spec


def prompt(spec: experience_pb2.EnvironmentSpec, max_new_tokens: int = 40, **fields) -> experience_pb2.PromptInstance:
    made = instance(**fields)
    made.prompt.environment.CopyFrom(spec)
    made.prompt.sampling.max_new_tokens = max_new_tokens
    return made


async def test_turns_and_answers_are_one_completion(world):
    world.engine.policy_version, world.engine.gives_masks = 7, True
    world.broker.create_run(sampling_masks=True)
    await world.put(prompt(environment(max_turns=3, parameters={"text": "!?"})))
    assert "environment.echo" in world.host.capabilities

    tensors = world.broker.tensors()
    rows = ["".join(map(chr, row)) for row in decode_ragged(tensors.completion_token_ids)]
    # A turn of completion 1 begins as index 0 of its own request.
    assert rows == ["aaa!?aaa!?aaa", "bbbb!?aaa!?aaa"]
    masks = decode_ragged(tensors.loss_mask)
    assert ["".join(map(str, row)) for row in masks] == ["1110011100111", "11110011100111"]
    assert masks[0].dtype == np.uint8
    log_probs = decode_ragged(tensors.rollout_log_probs)
    assert log_probs[0].tolist() == [-0.5] * 3 + [0, 0] + [-0.5] * 3 + [0, 0] + [-0.5] * 3
    assert [row.tolist() for row in decode_ragged(tensors.version_spans)] == [[7, 0, 13], [7, 0, 14]]
    assert decode(tensors.truncated).tolist() == [0, 0]
    assert decode_ragged(tensors.sampling_mask_counts)[0].tolist() == [0, 2, 2, 0, 0, 0, 2, 2, 0, 0, 0, 2, 2]
    assert decode_ragged(tensors.sampling_mask_token_ids)[0].tolist() == [97, 98] * 6

    infos = world.broker.transcript().completions
    assert [(info.text, info.turns, info.tokens, info.inserted_tokens) for info in infos] == [
        ("aaa!?aaa!?aaa", 3, 13, 4),
        ("bbbb!?aaa!?aaa", 3, 14, 4),
    ]
    assert {info.finish_reason for info in infos} == {experience_pb2.FINISH_REASON_STOP}
    assert sorted(item.completion for item in world.reward.items) == ["aaa!?aaa!?aaa", "bbbb!?aaa!?aaa"]
    assert world.broker.puts[0].group.header.completion_tokens == 27


async def test_a_turn_s_prompt_is_the_ids_so_far(world):
    spec = environment(max_turns=3, parameters={"text": "!?"})
    await world.put(prompt(spec, max_new_tokens=20))
    start = [ord(character) for character in "1+1=?"]
    first, *others = world.engine.requests
    assert first[1] == start and first[2] == 2 and first[3].max_new_tokens == 20 and first[3].stop == ("#",)
    row = decode_ragged(world.broker.tensors().completion_token_ids)[0].tolist()
    own = sorted(request for request in others if "/0/" in request[0])
    assert [request[1] for request in own] == [start + row[:5], start + row[:10]]
    assert [request[3].max_new_tokens for request in own] == [20 - 5, 20 - 10]
    assert {request[2] for request in others} == {1} and len(others) == 4


async def test_an_environment_sees_what_the_policy_wrote(world):
    await world.put(prompt(environment(parameters={"answers": 1})))
    episode = next(one for one in Echo.episodes if one.start.index == 1)
    assert episode.start.prompt.reference.answer == "2" and episode.start.prompt_text == "1+1=?"
    assert episode.start.run_id == "demo" and episode.closed == 1
    first, second = episode.turns
    assert (first.number, first.text, first.completion_text, first.stop) == (0, "bbbb", "bbbb", "")
    assert (second.number, second.text, second.completion_text) == (1, "aaa", "bbbb!aaa")
    assert second.token_ids.tolist() == [97] * 3 and second.completion_token_ids.size == 8


async def test_the_last_turn_alone_may_be_scored(world):
    spec = environment(max_turns=2, scored_text=experience_pb2.SCORED_TEXT_LAST_TURN)
    await world.put(prompt(spec))
    assert [item.completion for item in world.reward.items] == ["aaa", "aaa"]
    assert sorted(item.completion_tokens for item in world.reward.items) == [7, 8]


@pytest.mark.parametrize("rewards", [[0.25, None, 0.5], [0.75]])
async def test_rewards_of_turns_are_added_to_those_of_verifiers(world, rewards):
    await world.put(prompt(environment(parameters={"rewards": rewards})))
    tensors, infos = world.broker.tensors(), world.broker.transcript().completions
    assert [info.turns for info in infos] == [len(rewards)] * 2 and not infos[0].text.endswith("!")
    assert [each.tolist() for each in decode_ragged(tensors.turn_rewards)] == [[each or 0 for each in rewards]] * 2
    assert [each.tolist() for each in decode_ragged(tensors.turn_indices)] == [list(range(len(rewards)))] * 2
    assert [each[-1] for each in decode_ragged(tensors.turn_ends)] == [info.tokens for info in infos]
    verified = decode(tensors.outcome_rewards)
    assert verified.any() and decode(tensors.rewards).tolist() == (verified + 0.75).tolist()
    turns = infos[0].turn_infos
    assert [turn.reward if turn.HasField("reward") else None for turn in turns] == rewards
    assert {one.name: one.reward for one in infos[0].score.verifiers}["turns"] == 0.75


async def test_the_run_s_environment_is_that_of_prompts_without_one(world):
    world.broker.run.spec.environment.CopyFrom(environment(max_turns=2))
    world.broker.run.spec.sampling.max_new_tokens = 30
    for name, own, turns in (("a", None, [2, 2]), ("b", environment("single_turn"), [1, 1])):
        await world.put(prompt(own, name=name) if own else instance(name))
        assert [info.turns for info in world.broker.transcript(-1).completions] == turns


async def test_answers_and_turns_keep_to_the_budget(world):
    for budget, text in (
        (11, "aaa"),  # an answer of one token would leave 7 of the 8 that a turn has at least
        (12, "aaa!aaa"),  # as many as there must be; after the second turn there is no room for another
        (2, "aa"),  # cut off in its first turn
    ):
        await world.put(prompt(environment(), max_new_tokens=budget))
        info = world.broker.transcript(-1).completions[0]
        assert (info.text, info.finish_reason) == (text, experience_pb2.FINISH_REASON_LENGTH)
        assert decode(world.broker.tensors(-1).truncated)[0] == 1


async def test_a_long_answer_is_shortened_where_it_can_be_seen(world):
    long = "".join(chr(33 + i % 90) for i in range(500))
    await world.put(prompt(environment(max_turns=2, parameters={"text": long}), max_new_tokens=59))
    text = world.broker.transcript().completions[0].text
    assert text.startswith("aaa" + long[:4]) and text.endswith(long[-4:] + "aaa")
    assert "left out ...]" in text and len(text) == 59 - 8 + 3  # the answer leaves 8, of which the turn took 3


async def test_a_chat_is_answered_in_the_form_of_its_template(world):
    chat = experience_pb2.Chat(messages=[experience_pb2.Message(role="user", content="hi")])
    for role, text in (("tool", "aaa[tool]42[assistant]aaa"), ("", "aaa42aaa")):
        made = prompt(environment(max_turns=2, parameters={"text": "42", "role": role}), name=f"as {role}")
        made.prompt.chat.CopyFrom(chat)
        await world.put(made)
        assert world.broker.transcript(-1).completions[0].text == text


async def test_a_failure_of_an_environment_is_never_a_reward(world):
    for how, failure, permanent in (
        ("raises", "it raised ZeroDivisionError: division by zero", True),
        ("begin", "it raised KeyError: 'no level 7'", True),
        ("fails", "the game server is gone", False),
        ("permanent", "the level does not exist", True),
        ("hangs", "no answer to turn 0 within 0.1 s", False),
        ("odd", "it answered str; allowed: Answer or None", True),
        ("nan", "its reward of a turn is nan; allowed: a finite number", True),
        ("cancels", "it raised CancelledError: its own task", True),
        ("unprintable", "it raised Unprintable: its text cannot be made (RuntimeError)", True),
    ):
        spec = environment("broken", parameters={"how": how}, answer_deadline=Duration(nanos=100_000_000))
        release = await world.release(prompt(spec))
        assert (release.failure, release.permanent) == (f"environment: {failure}", permanent)
    assert not world.broker.puts and world.engine.running == 0
    await world.put(prompt(environment("broken", parameters={"how": "close"})))
    assert len(world.broker.transcript().completions) == 2


async def test_an_environment_that_ignores_its_cancellation_holds_up_neither_its_group_nor_the_end(
    world, monkeypatch, caplog
):
    monkeypatch.setattr(episode, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(episode, "_CANCEL_SECONDS", 0.1)
    spec = environment("broken", parameters={"how": "deaf"}, answer_deadline=Duration(nanos=100_000_000))
    before = ENVIRONMENT_TIMEOUTS.labels("broken")._value.get()
    async with asyncio.timeout(10):
        release = await world.release(prompt(spec))
        assert (release.failure, release.permanent) == ("environment: no answer to turn 0 within 0.1 s", False)
        assert ENVIRONMENT_TIMEOUTS.labels("broken")._value.get() > before
        assert "environment broken: no answer to turn 0 within 0.1 s" in caplog.messages
        await world.put(prompt(environment()))  # others are made as before
        waiting = len(WAITING)
        await world.broker.submit(prompt(environment("broken", parameters={"how": "deaf"})))
        await world.until(lambda: len(WAITING) > waiting)
        assert await world.stop() == 0
    for released in WAITING:
        released.set()


async def test_an_environment_that_cannot_be_used_is_said_by_field(world):
    for spec, failure, permanent in (
        (environment("chess"), "prompt.environment.name: this rollout has no environment 'chess'; it has: broken, ", 0),
        (environment(max_turns=-1), "prompt.environment.max_turns: got -1; allowed: 1 to 1024", 1),
        (environment(answer_deadline=Duration()), "prompt.environment.answer_deadline: got 0 s", 1),
        (environment(parameters={"txt": "x"}), "parameters.txt: got an unknown parameter; allowed: text, role", 1),
        (environment(parameters={"answers": math.nan}), "parameters.answers: got nan; allowed: a finite number", 1),
    ):
        release = await world.release(prompt(spec))
        assert failure in release.failure and release.permanent is bool(permanent)


async def test_turns_of_two_versions_are_told_apart(world):
    world.engine.length = 4
    one = prompt(environment(max_turns=3), max_new_tokens=50)
    await world.cross(one, tokens=4 + 5 + 2 + 2, free=1)  # both are in their second turn
    header, tensors = world.broker.puts[0].group.header, world.broker.tensors()
    assert (header.min_policy_version, header.max_policy_version) == (0, 1)
    for spans, tokens in zip(
        decode_ragged(tensors.version_spans), decode_ragged(tensors.completion_token_ids), strict=True
    ):
        triples = spans.reshape(-1, 3).tolist()
        assert [version for version, _, _ in triples] == [0, 1]
        assert triples[0][1] == 0 and triples[0][2] == triples[1][1] and triples[1][2] == tokens.size
    for info in world.broker.transcript().completions:
        assert [span.policy_version for span in info.version_spans] == [0, 1]


async def test_a_turn_that_an_update_aborts_is_drawn_again_from_the_same_ids(world):
    world.engine.length = 4
    one = prompt(environment(max_turns=2))
    await world.cross(one, tokens=4 + 5 + 2 + 2, free=1, pause_mode=rollout_pb2.PAUSE_MODE_ABORT)
    assert len(world.engine.requests) == 1 + 2 + 2
    assert [info.text for info in world.broker.transcript().completions] == ["aaaa!aaaa", "bbbbb!aaaa"]


async def test_a_lost_lease_ends_its_episodes(world):
    world.engine.step = 0.01
    world.broker.run.spec.prompt_lease_ttl.CopyFrom(Duration(nanos=300_000_000))
    await world.start()
    await world.broker.submit(prompt(environment(max_turns=1000), max_new_tokens=50))
    world.engine.max_model_len = 10**6
    await world.until(lambda: len(world.engine.requests) > 2)
    world.broker.lost.update(world.broker.leases)
    await world.until(lambda: Echo.episodes and all(one.closed for one in Echo.episodes) and not world.engine.running)
    assert not world.broker.puts and not world.broker.releases


async def test_seeds_of_turns_differ(world):
    made = prompt(environment(max_turns=3))
    made.prompt.sampling.seed = 5
    await world.put(made)
    seeds = [request[3].seed for request in world.engine.requests]
    assert len(set(seeds)) == len(seeds) == 5
    assert set(seeds[1:]) == {seeds[0] + index + (turn << 32) for index in (0, 1) for turn in (1, 2)}


async def test_direct_use_is_one_turn(world):
    world.broker.run.spec.environment.CopyFrom(environment())
    await world.ready()
    asked = prompt(environment()).prompt
    call = world.stub.Generate(rollout_pb2.GenerateRequest(prompt=asked), timeout=10)
    sentence = await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert sentence.startswith("prompt.environment.name: got 'echo'; allowed: 'single_turn'")
    asked.ClearField("environment")
    answer = await world.stub.Generate(rollout_pb2.GenerateRequest(prompt=asked), timeout=10)
    assert [completion.info.turns for completion in answer.completions] == [1, 1]


def test_the_run_file_s_environment_is_checked_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    config = load_config("rollout", RolloutSection, overrides=["rollout.engine=transformers"])
    config = replace(config, model=ModelSection(path=tmp_path))
    assert "single_turn" in preflight(config)["environments"]
    for section, sentence in (
        ({"name": "chess"}, "run.environment.name: this rollout has no environment 'chess'; it has: broken, echo, "),
        ({"name": "echo", "parameters": {"txt": "x"}}, "run.environment.parameters.txt: got an unknown parameter"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            preflight(replace(config, run=RunSection(environment=EnvironmentSection(**section))))


FILE = """
from quartet_rollout.environments import Answer

class Twice:
    def stop(self, parameters): return ()
    def begin(self, start, parameters, tools): return self
    async def answer(self, turn): return Answer("!?")
    async def close(self): pass

class Stopless:
    def begin(self, start, parameters, tools): return self

class Raises:
    def __init__(self): import sklearn
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path / "game.py"


async def test_an_environment_of_a_file_answers(world, file):
    run = RunSection(environment=f"{file}:Twice")
    assert registry.load_environments(run).keys() > {f"{file}:Twice", "single_turn"}
    await world.ready(environments=[f"{file}:Twice"])
    assert f"environment.{file}:Twice" in world.host.capabilities
    spec = environment_spec(EnvironmentSection(file=f"{file}:Twice", max_turns=2))
    await world.put(prompt(spec))
    texts = [info.text for info in world.broker.transcript().completions]
    assert texts == ["aaa!?aaa", "bbbb!?aaa"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Gone", "'.*game.py' has no function 'Gone'; it has: Twice, Stopless, Raises"),
        ("Stopless", "'.*game.py:Stopless': no environment: it lacks stop"),
        ("Raises", r"No module named 'sklearn'; if it is a package, install it: .* scikit-learn \(.*game.py:14\)"),
    ],
)
def test_an_environment_of_a_file_that_cannot_be_used_is_refused(file, name, sentence):
    overrides = ["rollout.engine=transformers", f"run.environment={file}:{name}"]
    with pytest.raises(ConfigError, match=f"run.environment.file: .*{sentence}"):
        preflight(load_config("rollout", RolloutSection, overrides=overrides))


def test_a_weight_interface_that_is_not_here_is_refused(tmp_path):
    config = load_config("rollout", RolloutSection, overrides=["rollout.weight_interface=eth77"])
    with pytest.raises(ConfigError, match=r"rollout.weight_interface: this host has no .* 'eth77' with an address"):
        preflight(config)
