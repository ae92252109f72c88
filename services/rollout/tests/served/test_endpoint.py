"""The model endpoint of a rollout with vLLM: keys, bounds, recording; and groups that an environment service plays.

In one file, because all share a rollout, which ends with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from quartet.v1 import environment_pb2, experience_pb2
from serving import PATIENCE, SAID, WORDLESS, Playing, Request, Response, failed, finished, say, talk

from quartet_common.durations import to_duration
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout.agents.rows import rows_of
from quartet_rollout.experience import GeneratedGroup

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def test_the_server_leaves_the_log_level_of_the_service(playing: Playing) -> None:
    assert logging.getLogger("quartet_rollout").isEnabledFor(logging.WARNING)


def test_an_application_is_served_unrecorded_and_bounded(playing: Playing, run: Any) -> None:
    answer = run(playing.chat("application", return_token_ids=True, logprobs=True, top_logprobs=0, ignore_eos=True))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert len(choice["token_ids"]) == 32  # max_tokens, which the request does not name
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{one}" for one in choice["token_ids"]]
    assert not len(playing.episodes)


@pytest.mark.parametrize(
    ("path", "key", "status", "said"),
    [
        ("/v1/chat/completions", "another", 401, "no API key"),
        ("/v1/chat/completions", "", 401, "no API key"),
        ("/v1/load_lora_adapter", "application", 404, "not served here"),
        ("/sleep", "application", 404, "not served here"),
        ("/inference/v1/abort_requests", "application", 404, "not served here"),
        ("/scale_elastic_ep", "application", 404, "not served here"),
    ],
)
def test_what_is_not_for_the_caller_is_refused(
    playing: Playing, run: Any, path: str, key: str, status: int, said: str
) -> None:
    answer = run(playing.post(path, key, messages=SAID))
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_a_conversation_is_one_row_with_the_log_probs_of_its_tokens(playing: Playing, run: Any) -> None:
    # Special tokens are not in the text that the agent gets and sends back, so the policy must not write any.
    episode = playing.open(logit_bias=dict.fromkeys(WORDLESS, -100.0))
    messages = list(SAID)

    async def talk() -> None:
        for stream in (False, True, False):
            body = {"messages": messages, "logprobs": True, "stream": stream}
            answer = await playing.chat(episode.key, **body)
            assert answer.status_code == 200, answer.text
            if stream:
                lines = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
                text = "".join(line["choices"][0]["delta"].get("content") or "" for line in lines if line["choices"])
            else:
                text = answer.json()["choices"][0]["message"]["content"]
            messages.extend([{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}])

    run(talk())
    playing.episodes.close(episode)
    assert not episode.trouble and len(episode.calls) == 3
    for call in episode.calls:
        turn = call.turn
        assert turn.version_spans == ((3, 0, turn.token_ids.size),)
        assert turn.log_probs.shape == turn.token_ids.shape and (turn.log_probs < 0).all()
    (row,) = rows_of(episode.calls)
    played = row.completion
    assert played.loss_mask is not None and played.turns == 3
    assert int(played.loss_mask.sum()) == sum(call.turn.token_ids.size for call in episode.calls)
    sampled = np.concatenate([call.turn.log_probs for call in episode.calls])
    assert np.array_equal(played.log_probs[played.loss_mask == 1], sampled)
    assert not played.log_probs[played.loss_mask == 0].any()


def test_a_recorded_log_prob_is_that_of_the_model(playing: Playing, run: Any) -> None:
    episode = playing.open(temperature=0.7)
    run(playing.post("/inference/v1/generate", episode.key, token_ids=[5, 6, 7], sampling_params={"max_tokens": 6}))
    (call,) = episode.calls
    assert call.prompt_token_ids.tolist() == [5, 6, 7]
    expected = playing.log_probs([5, 6, 7], call.turn.token_ids, temperature=0.7)
    assert np.allclose(call.turn.log_probs, expected, atol=1e-4)


def test_a_call_that_names_no_limit_has_that_of_its_episode(playing: Playing, run: Any) -> None:
    episode = playing.open(max_new_tokens=24, logit_bias=dict.fromkeys(WORDLESS, -100.0))
    for path, body in (
        ("/v1/completions", {"prompt": "1+2="}),
        ("/v1/chat/completions", {"messages": SAID}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7]}),
    ):
        answer = run(playing.post(path, episode.key, **body))
        assert answer.status_code == 200, answer.text
        assert episode.calls[-1].turn.token_ids.size == 24


def test_tokens_in_gives_the_names_that_renderers_read(playing: Playing, run: Any) -> None:
    sampling = {"max_tokens": 4, "logprobs": 1}
    answer = run(
        playing.post("/inference/v1/generate", "application", token_ids=[5, 6, 7], sampling_params=sampling)
    ).json()
    (choice,) = answer["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(choice["token_ids"])}]


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sampling_that_cannot_be_replayed_is_refused_in_an_episode_only(
    playing: Playing, run: Any, body: dict, parameter: str, stream: bool
) -> None:
    episode = playing.open()
    answer = run(playing.chat(episode.key, stream=stream, **body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == parameter
    playing.episodes.close(episode)
    assert not episode.calls and not episode.trouble
    assert run(playing.chat("application", max_tokens=4, **body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_beams_are_refused_in_an_episode(playing: Playing, run: Any, path: str) -> None:
    episode = playing.open()
    answer = run(playing.post(path, episode.key, messages=SAID, prompt="hi", use_beam_search=True, n=2))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"
    assert not episode.begun


def test_null_is_the_sampling_of_the_episode(playing: Playing, run: Any) -> None:
    episode = playing.open(temperature=0.7, top_p=0.9)
    unset = {"temperature": None, "top_p": None}
    assert run(playing.chat(episode.key, **unset)).status_code == 200
    answer = run(playing.post("/inference/v1/generate", episode.key, token_ids=[5], sampling_params=unset))
    assert answer.status_code == 200, answer.text


def test_a_refused_call_of_an_episode_is_none(playing: Playing, run: Any) -> None:
    """What vLLM refuses after the call has reached its engine: the agent may go on."""
    episode = playing.open(calls=2)
    for body in (
        {"token_ids": [5] * 5000},
        {"token_ids": [10**6]},
        {"token_ids": [2**70]},
        {"token_ids": [5], "sampling_params": {"logprobs": 1000}},
        {"token_ids": [5], "sampling_params": {"stop_token_ids": [10**9]}},
    ):
        answer = run(playing.post("/inference/v1/generate", episode.key, **body))
        assert answer.status_code == 400, answer.text
    assert run(playing.chat(episode.key)).status_code == 200
    playing.episodes.close(episode)
    assert not episode.trouble and episode.begun == len(episode.calls) == 1


@pytest.mark.parametrize("given", [None, [], "max_tokens"])
def test_sampling_that_is_no_object_is_refused(playing: Playing, run: Any, given: Any) -> None:
    for key in ("application", playing.open().key):
        answer = run(playing.post("/inference/v1/generate", key, token_ids=[5], sampling_params=given))
        assert answer.status_code == 400 and "allowed: an object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a"] * 65}),
        ("/v1/completions", {"prompt": [[5, 6]] * 33, "n": 2}),
        ("/v1/chat/completions", {"messages": SAID, "n": "65"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 65}}),
    ],
)
def test_an_application_cannot_ask_for_more_than_the_limit(playing: Playing, run: Any, path: str, body: dict) -> None:
    answer = run(playing.post(path, "application", **body))
    assert answer.status_code == 400 and "retry-after" not in answer.headers
    count = 66 if isinstance(body.get("n"), int) else 65
    assert f"{count} completions were asked for; allowed: 64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["x", ["x"]])
def test_the_key_of_masks_is_the_rollouts_own(playing: Playing, run: Any, value: Any) -> None:
    given = {"quartet_mask": value}
    for answer in (
        run(playing.chat("application", top_p=0.9, vllm_xargs=given)),
        run(
            playing.post(
                "/inference/v1/generate",
                "application",
                token_ids=[5],
                sampling_params={"top_p": 0.9, "extra_args": given},
            )
        ),
    ):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "quartet_mask", answer.text
    assert run(playing.chat("application")).status_code == 200


def test_an_episode_ends_with_its_key_and_its_calls(playing: Playing, run: Any) -> None:
    episode = playing.open(calls=1)
    assert run(playing.chat(episode.key)).status_code == 200
    answer = run(playing.chat(episode.key))
    assert answer.status_code == 400 and "1 calls" in answer.json()["error"]["message"]
    playing.episodes.close(episode)
    assert run(playing.chat(episode.key)).status_code == 401
    assert not episode.trouble and len(episode.calls) == 1


def test_a_call_left_before_its_end_is_trouble(playing: Playing, run: Any) -> None:
    """The engine is paused while the agent leaves, so that the call cannot end before."""
    episode = playing.open(max_new_tokens=32)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=playing.url, timeout=60) as client:
            body = {"model": "policy", "messages": SAID, "stream": True, "ignore_eos": True}
            headers = {"authorization": f"Bearer {episode.key}"}
            await playing.engine.pause("keep")
            async with client.stream("POST", "/v1/chat/completions", headers=headers, json=body) as answer:
                assert answer.status_code == 200
        async with asyncio.timeout(10):
            while not episode.trouble:
                await asyncio.sleep(0.01)
        await playing.engine.resume()

    run(leave())
    assert episode.trouble == "the agent left a call before its end" and not episode.calls


@pytest.mark.parametrize(("field", "value"), [("draining", True), ("sleep_level", 1)])
def test_a_rollout_that_cannot_sample_says_when_to_ask_again(
    playing: Playing, run: Any, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing.state, field, value)
    answer = run(playing.chat("application"))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"

    async def health() -> int:
        async with httpx.AsyncClient(base_url=playing.url) as client:
            return (await client.get("/health")).status_code

    assert run(health()) == 503
    monkeypatch.undo()
    assert run(health()) == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 100_000 + b"]" * 100_000, 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'"' + b"x" * (17 << 20) + b'"', 413),
    ],
    ids=["no-json", "a-list", "nested", "nan", "large"],
)
def test_a_body_that_is_no_request_is_refused(playing: Playing, run: Any, content: bytes, status: int) -> None:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(base_url=playing.url, timeout=60) as client:
            headers = {"authorization": "Bearer application"}
            return await client.post("/v1/completions", headers=headers, content=content)

    assert run(send()).status_code == status


def test_a_group_of_episodes_has_their_tokens_and_rewards(playing: Playing) -> None:
    before = len(playing.episodes)
    put = playing.put()
    header, tensors = put.group.header, playing.broker.tensors(-1)
    assert header.completions == 2 and header.reward_mean == 0.5
    assert decode(tensors.rewards).tolist() == [0.0, 1.0]
    rows, masks = decode_ragged(tensors.completion_token_ids), decode_ragged(tensors.loss_mask)
    log_probs = decode_ragged(tensors.rollout_log_probs)
    for row, mask, logs in zip(rows, masks, log_probs, strict=True):
        assert row.size == mask.size == logs.size
        assert 2 <= mask.sum() <= 16 and not mask.all()
        assert (logs[mask == 1] < 0).all() and not logs[mask == 0].any()
    transcript = playing.broker.transcript(-1)
    assert [info.turns for info in transcript.completions] == [2, 2]
    assert transcript.completions[1].score.reason == "it was played"
    assert "why?" in transcript.prompt_text
    assert len(set(playing.environment.keys[-2:])) == 2 and len(playing.episodes) == before


def test_rewards_are_a_weighted_sum_by_name_with_those_of_the_turns(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        await talk(request)
        response = finished(1.0, 2.0, turns=(0.25, 0.5))
        response.finished.seats[0].rewards[1].weight = -0.5
        return response

    assert playing.put(play).group.header.reward_mean == pytest.approx(0.75)
    means = {mean.name: mean.reward for mean in playing.broker.puts[-1].group.header.verifiers}
    assert means == {"part0": 1.0, "part1": 2.0, "turns": 0.75}


def test_a_failure_is_no_reward(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        return await talk(request) if request.index else failed("the tool is away", retryable=True)

    release = playing.release(play)
    assert "episode 0: the tool is away" in release.failure and not release.permanent
    release = playing.release(lambda request: _answer(failed("agent.py raised", retryable=False)))
    assert "agent.py raised" in release.failure and release.permanent


async def _answer(response: Response) -> Response:
    return response


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (finished(float("nan")), "its reward 'part0' is nan"),
        (finished(1e60), "its reward 'part0' is 1e+60"),
        (finished(), "without a reward"),
        (Response(), "answered with nothing"),
        (Response(finished=environment_pb2.EpisodeResult()), "it has no trainable seat"),
        (finished(1.0, trainable=False), "it has no trainable seat"),
        (finished(1.0, turns=(0.0, 0.0, 1.0)), "turn 2 has a reward; its turns are 0 to 1, its calls to the endpoint"),
        (finished(1.0, sessions=["judge"]), "calls with the header X-Session-ID [''] are of no seat; its seats have ["),
        (finished(1.0, seats=2), "seat 'seat-0' has no session; with several seats each needs its own"),
        (finished(1.0, seats=2, sessions=["", "x"]), "session '' is of two seats; allowed: one"),
    ],
)
def test_what_is_no_reward_is_refused(playing: Playing, response: Response, said: str) -> None:
    async def play(request: Request) -> Response:
        await talk(request)
        return response

    assert said in playing.release(play).failure


def test_an_episode_without_a_call_cannot_be_trained_on(playing: Playing) -> None:
    release = playing.release(lambda request: _answer(finished(1.0)))
    assert "its agent made no call" in release.failure and release.permanent


def checked(playing: Playing) -> tuple[Any, Any]:
    """The last group's tensors and transcript, the log-probs of its rows compared with the model's."""
    tensors, transcript = playing.broker.tensors(-1), playing.broker.transcript(-1)
    prompts, of_row = decode_ragged(tensors.prompts), decode(tensors.row_prompts)
    masks = decode_ragged(tensors.loss_mask) if tensors.loss_mask.lengths else None
    for number, row in enumerate(decode_ragged(tensors.completion_token_ids)):
        sampled = np.ones(row.size, bool) if masks is None else masks[number] == 1
        expected = playing.log_probs(prompts[of_row[number]], row, bias=WORDLESS)
        recorded = decode_ragged(tensors.rollout_log_probs)[number]
        assert np.allclose(recorded[sampled], expected[sampled], atol=1e-4)
    ends, spans = decode_ragged(tensors.turn_ends), decode_ragged(tensors.version_spans)
    for row, end, span in zip(decode_ragged(tensors.completion_token_ids), ends, spans, strict=True):
        assert end[-1] == row.size == span[-1]
    return tensors, transcript


def test_a_sub_agent_has_a_row_of_its_own_and_the_reward_is_there_once(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        answer = await say(request, SAID)
        await say(request, [{"role": "user", "content": f"sum up: {request.index}"}])
        await say(request, [*SAID, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}])
        return finished(float(request.index), turns=(0.5, 0.0, 0.25))

    header = playing.put(play).group.header
    assert header.completions == 2 and header.reward_mean == 1.25
    assert header.reward_std == pytest.approx(np.std([0.75, 1.75], ddof=1))
    tensors, transcript = checked(playing)
    assert not tensors.HasField("prompt_token_ids") and tensors.sampling.n == 2
    assert decode(tensors.row_completions).tolist() == [0, 0, 1, 1]
    assert decode(tensors.row_prompts).tolist() == [0, 1, 0, 2]
    assert decode(tensors.seats).tolist() == [0, 0]
    assert [each.tolist() for each in decode_ragged(tensors.turn_indices)] == [[0, 2], [1], [0, 2], [1]]
    assert [each.tolist() for each in decode_ragged(tensors.turn_rewards)] == [[0.5, 0.25], [0.0], [0.5, 0.25], [0.0]]
    assert decode(tensors.outcome_rewards).tolist() == [0.0, 1.0] and decode(tensors.rewards).tolist() == [0.75, 1.75]
    first = transcript.completions[0]
    assert first.tokens == sum(tensors.completion_token_ids.lengths[:2]) and first.turns == 3
    assert [row.tokens for row in first.rows] == list(tensors.completion_token_ids.lengths[:2])
    assert "call 1 read" in first.rows[1].begun and "sum up: 0" in first.rows[1].prompt_text
    assert first.rows[1].begun in first.text and first.version_spans[-1].end == first.tokens
    assert [(turn.row, turn.reward) for turn in first.turn_infos] == [(0, 0.5), (1, 0.0), (0, 0.25)]


def test_seats_are_completions_of_their_own(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        for seat in ("black", "white", "judge", "black"):
            await say(request, [{"role": "user", "content": f"{seat} plays"}], extra_headers={"X-Session-ID": seat})
        value = 1.0 if request.index else -0.5
        seats = [
            environment_pb2.SeatResult(
                name=name, sessions=[name], trainable=name != "judge", rewards=[{"value": reward}]
            )
            for name, reward in (("black", value), ("white", -value), ("judge", 0.0))
        ]
        return Response(finished=environment_pb2.EpisodeResult(seats=seats))

    header = playing.put(play).group.header
    assert header.completions == 4 and header.reward_mean == 0.0
    assert header.reward_std == pytest.approx(np.std([1.0, -0.5], ddof=1))
    tensors, transcript = checked(playing)
    assert decode(tensors.seats).tolist() == [0, 1, 0, 1]
    assert decode(tensors.row_completions).tolist() == [0, 0, 1, 2, 2, 3], "black made two calls of one prompt"
    assert decode(tensors.rewards).tolist() == [-0.5, 0.5, 1.0, -1.0]
    assert [(info.episode, info.index, info.seat) for info in transcript.completions] == [
        (0, 0, "black"),
        (0, 1, "white"),
        (1, 2, "black"),
        (1, 3, "white"),
    ]
    assert not any("judge" in row.prompt_text for info in transcript.completions for row in info.rows)


def test_verifiers_are_added_where_that_is_asked_and_an_environments_part_is_kept_with_the_completions(
    playing: Playing,
) -> None:
    last = experience_pb2.SCORED_TEXT_LAST_TURN

    async def play(request: Request) -> Response:
        for text in ("one", "two"):
            await say(request, [{"role": "user", "content": text}])
        return finished(float(request.index), turns=(0.25,))

    playing.reward.reward = 2.0
    put = playing.put(play, add_verifiers=True, scored_text=last)
    tensors, transcript = checked(playing)
    assert decode(tensors.rewards).tolist() == [2.25, 3.25] and decode(tensors.outcome_rewards).tolist() == [2.0, 3.0]
    assert [mean.name for mean in put.group.header.verifiers] == ["part0", "turns", "length", "none", "length-2"]
    assert put.group.header.ans_acc == 0.5, "the verifier's"
    for item, info in zip(playing.reward.items[-2:], transcript.completions, strict=True):
        assert item.completion == info.rows[1].text and item.completion_tokens == info.tokens

    playing.reward.raises_on = "two"
    kept = playing.release(play, add_verifiers=True).unscored
    playing.reward.raises_on, playing.reward.reward = "", None
    group = GeneratedGroup.of_unscored(kept, attempt=2)
    for info in group.transcript.completions:
        info.score.reward = 5.0
    assert group.scored().header.reward_mean == 5.75
    assert decode(group.tensors.outcome_rewards).tolist() == [5.0, 6.0]


def test_episodes_that_begin_differently_are_a_group(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        await say(request, [{"role": "user", "content": f"game {request.index}"}])
        return finished(float(request.index))

    playing.put(play)
    tensors, transcript = checked(playing)
    assert decode(tensors.row_prompts).tolist() == [0, 1] and decode(tensors.row_completions).tolist() == [0, 1]
    assert "game 0" in transcript.prompt_text
    assert [len(info.rows) for info in transcript.completions] == [0, 1]


def test_a_seat_that_is_silent_or_missing_in_an_episode_is_refused(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        await say(request, SAID, extra_headers={"X-Session-ID": "a"})
        seat = {"trainable": True, "rewards": [{"value": 1.0}]}
        names = ("a", "b") if request.index else ("a",)
        seats = [environment_pb2.SeatResult(name=name, sessions=[name], **seat) for name in names]
        return Response(finished=environment_pb2.EpisodeResult(seats=seats))

    release = playing.release(play)
    assert "seat 'b' made no call to the endpoint" in release.failure and not release.permanent


def test_an_agent_that_uses_another_episodes_key_made_no_call_of_its_own(playing: Playing) -> None:
    requests: dict[int, Request] = {}

    async def play(request: Request) -> Response:
        requests[request.index] = request
        while len(requests) < 2:
            await asyncio.sleep(0.01)
        if request.index == 0:
            await say(requests[1], SAID)  # as one that keeps the client of another task would
            return finished(1.0)
        await asyncio.sleep(20)
        return finished(0.0)

    release = playing.release(play)
    assert "episode 0: its agent made no call to the endpoint" in release.failure and release.permanent


def test_a_call_that_goes_on_after_its_episode_is_no_part_of_it(playing: Playing) -> None:
    calls: list[asyncio.Task[str]] = []

    async def play(request: Request) -> Response:
        if request.index:
            return await talk(request)
        await say(request, SAID)
        await playing.engine.pause("keep")
        begun = playing.episodes.find(request.endpoint.api_key)
        assert begun is not None
        calls.append(asyncio.create_task(say(request, SAID)))
        while begun.begun < 2:
            await asyncio.sleep(0.01)
        return finished(1.0)

    async def resumed() -> None:
        await playing.engine.resume()
        await asyncio.gather(*calls, return_exceptions=True)

    release = playing.release(play)
    playing._run(resumed())
    assert "the episode ended while a call was under way" in release.failure and not release.permanent


def test_an_episode_beyond_its_deadline_fails(playing: Playing) -> None:
    async def play(request: Request) -> Response:
        raise TimeoutError

    release = playing.release(play, answer_deadline=to_duration(1.0))
    assert "episode" in release.failure and not release.permanent


def test_a_turn_is_no_longer_than_allowed_and_calls_are_counted(playing: Playing) -> None:
    refusals: list[str] = []

    async def play(request: Request) -> Response:
        response = await talk(request)
        try:
            await say(request, [{"role": "user", "content": "why?"}])
        except openai.BadRequestError as error:
            refusals.append(str(error))
        return response

    playing.put(play, max_turns=2, max_turn_tokens=3)
    assert len(refusals) == 2 and "has had its 2 calls" in refusals[0]
    masks = decode_ragged(playing.broker.tensors(-1).loss_mask)
    assert all(int(mask.sum()) <= 6 for mask in masks)


def test_episodes_wait_for_a_service_that_is_away(playing: Playing) -> None:
    away = iter([True, True])
    real = playing.environment.RunEpisode

    async def sometimes(request: Request, context: grpc.aio.ServicerContext) -> Response:
        if next(away, False):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is starting")
        return await real(request, context)

    playing.environment.RunEpisode = sometimes  # type: ignore[method-assign]
    try:
        assert playing.put().group.header.completions == 2
    finally:
        del playing.environment.RunEpisode


def test_log_probs_of_all_turns_are_those_of_the_model(playing: Playing) -> None:
    playing.put()
    tensors = playing.broker.tensors(-1)
    prompt, row = decode(tensors.prompt_token_ids), decode_ragged(tensors.completion_token_ids)[0]
    sampled, recorded = decode_ragged(tensors.loss_mask)[0] == 1, decode_ragged(tensors.rollout_log_probs)[0]
    expected = playing.log_probs(prompt, row, bias=WORDLESS)
    assert np.allclose(recorded[sampled], expected[sampled], atol=1e-4)
