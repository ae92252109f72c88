"""An episode's calls as rows, with tokens that are written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quartet_rollout.agents.episodes import Call
from quartet_rollout.agents.rows import as_sampled, rows_of
from quartet_rollout.engines.base import EngineCompletion

WORDS = ["", "a", "b", "ab", "c", "bc", "<end>", "\n", "user:", "X", "assistant:"]
"""Token id to text: "ab" and "bc" have one and two spellings."""


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def call(prompt: list[int], sampled: list[int], version: int = 0, answer: str | None = None, asked: str = "") -> Call:
    log_probs = np.linspace(-1, -2, len(sampled), dtype=np.float32)
    turn = EngineCompletion(0, np.asarray(sampled, np.int32), log_probs, "stop", ((version, 0, len(sampled)),))
    return Call(np.asarray(prompt, np.int32), turn, asked or decode(prompt), answer or decode(sampled), "")


def test_calls_that_continue_are_one_row_with_the_inserted_tokens_masked() -> None:
    calls = [call([8, 9], [3, 6], version=1), call([8, 9, 3, 6, 7, 8], [4, 6], version=2)]
    (row,) = rows_of(calls)
    played = row.completion
    assert row.prompt_token_ids.tolist() == [8, 9] and row.turn_indices == (0, 1) and not row.begun
    assert played.token_ids.tolist() == [3, 6, 7, 8, 4, 6]
    assert played.loss_mask is not None and played.loss_mask.tolist() == [1, 1, 0, 0, 1, 1]
    assert played.log_probs.tolist() == [-1, -2, 0, 0, -1, -2]
    assert played.version_spans == ((1, 0, 4), (2, 4, 6))
    assert played.turn_ends == (2, 6) and played.last_turn == (4, 6)


def test_a_rewritten_history_begins_another_row() -> None:
    calls = [call([8, 9], [3, 6]), call([8, 9, 4, 6, 7], [4, 6]), call([8, 9, 3, 6, 7], [1, 6])]
    first, second = rows_of(calls)
    assert first.completion.token_ids.tolist() == [3, 6, 7, 1, 6] and first.turn_indices == (0, 2)
    assert second.prompt_token_ids.tolist() == [8, 9, 4, 6, 7] and second.completion.token_ids.tolist() == [4, 6]
    assert second.begun == "call 1 read 5 tokens, of which the first 2 are those of conversation 0 (4 tokens)"


def test_two_answers_to_one_prompt_are_two_rows_and_the_longer_is_continued() -> None:
    calls = [call([8], [1]), call([8, 1], [2]), call([8], [1]), call([8, 1, 2, 7], [4])]
    first, second = rows_of(calls)
    assert first.completion.token_ids.tolist() == [1, 2, 7, 4]
    assert second.completion.token_ids.tolist() == [1]


def test_a_history_tokenized_anew_is_read_as_it_was_sampled() -> None:
    sampled = call([8, 9], [1, 5, 6])  # "a" "bc" "<end>"
    again = [8, 9, 3, 4, 6, 7, 8, 9, 10]  # "ab" "c" "<end>" "\n" …
    assert as_sampled(again, [sampled], decode) == [8, 9, 1, 5, 6, 7, 8, 9, 10]
    (row,) = rows_of([sampled, call(as_sampled(again, [sampled], decode), [4])])
    assert row.completion.token_ids.tolist() == [1, 5, 6, 7, 8, 9, 10, 4]


def test_the_longest_earlier_call_is_continued() -> None:
    calls = [call([8], [1, 2]), call([8, 1, 2, 7], [1, 2])]
    assert as_sampled([8, 3, 7, 3, 7], calls, decode) == [8, 1, 2, 7, 1, 2, 7]


def test_another_text_stays_as_it_came() -> None:
    sampled = call([8, 9], [1, 5, 6])
    for prompt in ([8, 9, 3, 6, 7], [8, 9, 3], [9, 3, 4, 6], [8, 9, 1, 5, 6, 7]):
        assert as_sampled(prompt, [sampled], decode) == prompt


def test_a_token_that_reaches_over_the_end_of_the_turn_is_not_cut() -> None:
    sampled = call([8], [1])  # the policy wrote "a"; the new prompt has "ab" as one token
    assert as_sampled([8, 3, 7], [sampled], decode) == [8, 3, 7]


def test_an_end_of_sequence_that_the_agent_did_not_get_is_restored() -> None:
    first = call([8, 9], [1, 6], answer="a")
    again = as_sampled([8, 9, 1, 7, 9], [first], decode)
    assert again == [8, 9, 1, 6, 7, 9]
    second = call(again, [4, 6], answer="c", asked="user:Xa\nX")  # the agent never sees the first end
    assert as_sampled([8, 9, 1, 7, 9, 4, 7], [first, second], decode) == [8, 9, 1, 6, 7, 9, 4, 6, 7]


def test_an_end_of_sequence_that_the_template_writes_again_is_there_once() -> None:
    sampled = call([8, 9], [10, 1, 6], answer="a")  # a special token in the turn was left out of the answer
    assert as_sampled([8, 9, 1, 6, 7, 8], [sampled], decode) == [8, 9, 10, 1, 6, 7, 8]


def test_a_history_that_begins_with_a_shorter_call_continues_the_longer_one() -> None:
    calls = [call([8], [1, 6]), call([8, 1, 6, 7], [1, 2, 6])]
    assert as_sampled([8, 1, 6, 7, 3, 6, 7], calls, decode) == [8, 1, 6, 7, 1, 2, 6, 7]
