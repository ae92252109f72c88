"""The calls of an episode as rows of tokens to train on.

A call whose prompt begins with all tokens of a row continues it: what is between is inserted, read by the policy and
not in the loss. Every other call begins a row of its own: a rewritten history, a sub-agent, another conversation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_rollout.agents.episodes import Call
from quartet_rollout.environments.conversation import Conversation, PlayedCompletion


@dataclass(frozen=True)
class Row:
    """Calls of which each begins with all tokens of the one before."""

    prompt_token_ids: np.ndarray
    """int32 [P]: what the first call read."""
    completion: PlayedCompletion
    """What followed."""
    turn_indices: tuple[int, ...]
    """The position of each turn among all calls, from 0."""
    begun: str
    """Why the first call continued no other row; "" of the first row."""


class _Growing:
    def __init__(self, call: Call, begun: str):
        self.conversation, self.begun = Conversation(call.prompt_token_ids), begun
        self.calls: list[int] = []
        self.reason = call.turn.finish_reason


def rows_of(calls: Sequence[Call]) -> list[Row]:
    """Return the rows, in the order in which they began. Each call continues the longest row that it can."""
    rows: list[_Growing] = []
    for number, call in enumerate(calls):
        prompt = call.prompt_token_ids
        row = max(
            (one for one in rows if begins_with(prompt, one.conversation.token_ids)),
            key=lambda one: one.conversation.size,
            default=None,
        )
        if row is None:
            row = _Growing(call, _why(number, prompt, rows))
            rows.append(row)
        elif (inserted := prompt[row.conversation.token_ids.size :]).size:
            row.conversation.insert(inserted)
        row.conversation.add_turn(call.turn)
        row.calls.append(number)
        row.reason = call.turn.finish_reason
    return [
        Row(one.conversation.prompt_token_ids, one.conversation.completed(n, one.reason), tuple(one.calls), one.begun)
        for n, one in enumerate(rows)
    ]


def _why(number: int, prompt: np.ndarray, rows: Sequence[_Growing]) -> str:
    if not rows:
        return ""
    shared = [_shared(prompt, one.conversation.token_ids) for one in rows]
    nearest = int(np.argmax(shared))
    return (
        f"call {number} read {prompt.size} tokens, of which the first {shared[nearest]} are those of conversation "
        f"{nearest} ({rows[nearest].conversation.token_ids.size} tokens)"
    )


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many first tokens are the same."""
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def begins_with(token_ids: np.ndarray, first: np.ndarray) -> bool:
    """Whether `token_ids` [T] begin with all of `first` [F]."""
    return first.size <= token_ids.size and bool((token_ids[: first.size] == first).all())


def as_sampled(token_ids: Sequence[int], calls: Sequence[Call], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return a prompt with its beginning as it was sampled, if that is the same text.

    A client sends back the text of the policy's turns, and the server tokenizes it again: often into other tokens than
    those the policy wrote, and without the end of sequence and special tokens that were left out of the answer. Where
    the prompt's text begins with that of an earlier call, question and answer, the call's own tokens replace it: so the
    policy reads what it wrote, and the row continues. The longest such call is taken.

    Args:
        decode: text of tokens, special tokens included.
    """
    prompt, text = np.asarray(token_ids, dtype=np.int32), decode(token_ids)
    for call in sorted(calls, key=lambda call: call.prompt_token_ids.size + call.turn.token_ids.size, reverse=True):
        sampled = np.concatenate([call.prompt_token_ids, call.turn.token_ids])
        if begins_with(prompt, sampled):
            break
        written = decode(call.turn.token_ids.tolist())
        for answer in dict.fromkeys((written, call.answer)):
            said = call.question + answer
            if not answer or not text.startswith(said) or (end := _prefix(token_ids, said, decode)) is None:
                continue
            rest = token_ids[end:]
            if answer != written and rest and rest[0] == sampled[-1]:
                rest = rest[1:]  # the end of the turn, which the template writes again
            return [*sampled.tolist(), *rest]
    return list(token_ids)


def _prefix(token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return how many of the tokens have this text; None if a token reaches over its end."""
    low, high = 0, len(token_ids)
    while low < high:  # the text of the first n tokens grows with n
        middle = (low + high) // 2
        if len(decode(token_ids[:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    return low if decode(token_ids[:low]) == text else None
