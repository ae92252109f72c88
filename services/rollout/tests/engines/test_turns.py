"""Completions of several turns on every engine: exact ids and masks, and log-probs that plain transformers confirms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import PATIENCE, Harness
from quartet.v1 import experience_pb2

from quartet_rollout.engines import SamplingSettings
from quartet_rollout.environments import Answer, Chosen, Parameters, Start, Turn
from quartet_rollout.environments.answers import AnswerWriter
from quartet_rollout.environments.conversation import PlayedCompletion
from quartet_rollout.environments.episode import Scene, play
from quartet_rollout.prompts import PromptReader
from quartet_rollout.sampling import Draw

TOLERANCE = 1e-4
STOPS = tuple(range(0, 90, 5))  # a random model ends a turn after five tokens or so
pytestmark = pytest.mark.timeout(2 * PATIENCE)


class Counting:
    """Answers how many tokens the turn had, and remembers all it was told."""

    name = "counting"
    description = "Answers the number of tokens."
    parameters = Parameters

    def __init__(self) -> None:
        self.turns: list[tuple[int, Turn, str]] = []

    def stop(self, parameters: Parameters) -> tuple[str, ...]:
        return ("<answer>",)

    def begin(self, start: Start, parameters: Parameters, tools: Any) -> CountingEpisode:
        return CountingEpisode(self, start)


class CountingEpisode:
    """One completion's."""

    def __init__(self, environment: Counting, start: Start):
        self._environment, self._index = environment, start.index

    async def answer(self, turn: Turn) -> Answer:
        text = f"[{turn.token_ids.size} tokens]"
        self._environment.turns.append((self._index, turn, text))
        return Answer(text)

    async def close(self) -> None:
        """Nothing to free."""


def scene(harness: Harness, environment: Any, n: int, **sampling: Any) -> Scene:
    engine = harness.engine
    tokenizer = engine.tokenizer()
    reader = PromptReader(tokenizer, engine.max_model_len)
    prompt = experience_pb2.Prompt(text="2+3=?")
    settings = SamplingSettings(stop_token_ids=STOPS, **{"max_new_tokens": 200, **sampling})
    return Scene(
        engine=engine,
        request_id=harness.request_id(),
        prompt=prompt,
        prompt_token_ids=reader.token_ids(prompt, ""),
        draw=Draw(n, settings),
        chosen=Chosen(environment, Parameters(), 4, 0, 64, 60.0, False),
        reader=reader,
        writer=AnswerWriter(tokenizer),
        tools=None,  # type: ignore[arg-type]
        run_id="demo",
    )


async def played(given: Scene) -> list[PlayedCompletion]:
    completions = [completion async for completion in play(given)]
    return sorted(completions, key=lambda completion: completion.index)


def test_ids_masks_and_log_probs_are_those_of_the_whole_conversation(harness: Harness) -> None:
    environment = Counting()
    given = scene(harness, environment, 6, seed=3)
    completions = harness.run(played(given))
    prompt = given.prompt_token_ids.tolist()
    tokenizer = harness.engine.tokenizer()
    assert [completion.index for completion in completions] == list(range(6))
    for completion in completions:
        # From what the environment was told: turn, answer, turn, ...; then what came last.
        told = [(turn, text) for index, turn, text in environment.turns if index == completion.index]
        ids, mask = [], []
        for turn, text in told:
            assert turn.completion_token_ids.tolist() == ids + turn.token_ids.tolist()
            answer = tokenizer.encode(text, add_special_tokens=False)
            ids += turn.token_ids.tolist() + answer
            mask += [1] * turn.token_ids.size + [0] * len(answer)
        begin, end = completion.last_turn
        assert completion.token_ids[: len(ids)].tolist() == ids and (begin, end) == (
            len(ids),
            completion.token_ids.size,
        )
        assert completion.loss_mask.tolist() == mask + [1] * (end - begin)
        assert completion.turns == 4 == len(told) + 1 and completion.finish_reason == "stop"
        assert completion.version_spans == ((0, 0, end),)

        generated = completion.loss_mask.astype(bool)
        expected = harness.log_probs(harness.folders[0], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs[generated], expected[generated], atol=TOLERANCE)
        assert (completion.log_probs[~generated] == 0).all()


def test_candidates_of_truncated_sampling_stay_with_their_tokens(harness: Harness) -> None:
    completions = harness.run(played(scene(harness, Counting(), 3, top_k=5, masks=True)))
    for completion in completions:
        counts = completion.mask.counts
        assert counts.size == completion.token_ids.size
        assert (counts == np.where(completion.loss_mask, 5, 0)).all()
        candidates = np.split(completion.mask.token_ids, np.cumsum(counts)[:-1])
        for token, allowed, generated in zip(completion.token_ids, candidates, completion.loss_mask, strict=True):
            assert not generated or token in allowed
