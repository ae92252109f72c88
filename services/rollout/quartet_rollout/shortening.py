"""Prompts that are too long, shortened at their beginning.

What a chat needs to be answered at all stays: its system message, with whatever the chat template puts before the
first turn, and the generation prompt at its end. Its oldest turns go first, whole; only when the last one alone is too
long is the beginning of that one cut off, behind its header. Text and token ids lose their first tokens, but never a
beginning-of-sequence token.
"""

import os
from collections.abc import Callable

import numpy as np

from quartet_rollout.sampling import PromptRefused

Message = dict[str, str]


def shorten_tokens(token_ids: np.ndarray, room: int, bos_token_id: int | None) -> np.ndarray:
    """Return the last `room` tokens, int32; the first of them is the beginning of sequence if it was there."""
    if token_ids.size <= room:
        return token_ids
    head = token_ids[:1] if bos_token_id is not None and int(token_ids[0]) == bos_token_id else token_ids[:0]
    return _cut(token_ids, head.size, room, needed=head.size + 1)


def shorten_chat(
    messages: list[Message],
    room: int,
    render: Callable[[list[Message], bool], str],
    encode: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Return the tokens of the chat, int32, at most `room`.

    Args:
        messages: the chat, its system message (if any) among them.
        render: the chat template; its second argument asks for the generation prompt. Raises PromptRefused.
        encode: the tokenizer.

    Raises:
        PromptRefused: the template refuses the chat, or there is no room for what must stay.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] != "system"]
    kept, text = messages, render(messages, True)
    token_ids = encode(text)
    if token_ids.size <= room:
        return token_ids
    # The fewest turns to drop, by bisection: a chat may have 100,000 turns, and each try costs all of it.
    fitting, first, end = None, 1, len(turns)
    while first < end:
        middle = (first + end) // 2
        for dropped in range(middle, end):
            gone = set(turns[:dropped])
            shorter = [message for at, message in enumerate(messages) if at not in gone]
            try:
                rendered = render(shorter, True)
            except PromptRefused:
                continue  # e.g. a template that wants the user to begin
            shortened = encode(rendered)
            if shortened.size <= room:
                fitting, end = shortened, middle
            else:
                kept, text, token_ids, first = shorter, rendered, shortened, dropped + 1
            break
        else:
            end = middle
    if fitting is not None:
        return fitting
    head = encode(_before_first_turn(kept, text, render))
    same = int(np.argmin(np.append(head[: token_ids.size] == token_ids[: head.size], False)))
    generation_prompt = encode(text.removeprefix(render(kept, False))).size
    return _cut(token_ids, same, room, needed=same + min(generation_prompt, token_ids.size - same) + 1)


def _before_first_turn(messages: list[Message], text: str, render: Callable[[list[Message], bool], str]) -> str:
    """What the template puts before the content of the first turn: found by giving that turn another content."""
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), None)
    if first is None:
        return ""
    other = "b" if messages[first]["content"].lstrip()[:1] == "a" else "a"
    changed = [{**message, "content": other} if at == first else message for at, message in enumerate(messages)]
    return os.path.commonprefix([text, render(changed, True)])


def _cut(token_ids: np.ndarray, head: int, room: int, needed: int) -> np.ndarray:
    """Leave out what follows the first `head` tokens until `room` are left."""
    if room < needed:
        raise PromptRefused(
            "prompt.input",
            f"{token_ids.size} tokens, of which {needed} at least must stay",
            f"at most {max(room, 0)}: there is no room for what may not be cut off",
        )
    return np.concatenate([token_ids[:head], token_ids[token_ids.size - (room - head) :]])
