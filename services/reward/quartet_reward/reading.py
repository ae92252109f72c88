"""Finds the answer in a completion. Pure text, linear time: a completion may be megabytes of anything."""

import re
from collections.abc import Sequence

# What tokenizers write for the end of a turn or of a text, and for padding.
SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<pad>",
    "<|pad|>",
)

THINK_ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def without_trailing_special_tokens(text: str, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> str:
    """Return `text` without white space and special tokens at its end, in whatever order they stand there."""
    suffixes = tuple(token for token in special_tokens if token)
    text = text.rstrip()
    while suffixes and text.endswith(suffixes):
        text = text.removesuffix(next(token for token in suffixes if text.endswith(token))).rstrip()
    return text


def fault_of_think_answer_form(text: str) -> str:
    """Return why `text` is not `<think>…</think>…<answer>…</answer>`, each tag once and nothing after; "" if it is."""
    position = -1
    for tag in THINK_ANSWER_TAGS:
        count = text.count(tag)
        if count != 1:
            return f"{tag} stands {count} times; it must stand once"
        found = text.find(tag)
        if found < position:
            return f"{tag} stands too early; the order is {' '.join(THINK_ANSWER_TAGS)}"
        position = found
    if not text.endswith("</answer>"):
        return "text follows </answer>"
    return ""


def last_tagged_answer(text: str) -> str | None:
    """Return what the last `<answer>…</answer>` holds, or None if there is none."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def after_thinking(text: str) -> str:
    """Return what follows the thought, since a box in it is no answer; nothing follows one that never ends."""
    closed = text.rfind("</think>")
    rest = text if closed < 0 else text[closed + len("</think>") :]
    opened = rest.find("<think>")
    return rest if opened < 0 else rest[:opened]


def last_boxed(text: str) -> str | None:
    """Return what the last complete `\\boxed{…}` (or `\\fbox`) holds, braces matched, or None if there is none."""
    open_braces: list[int] = []  # where the content of each open box starts; -1 for any other brace
    found: str | None = None
    for token in _BRACES.finditer(text):
        if token.lastgroup == "box":
            open_braces.append(token.end())
        elif token.lastgroup == "open":
            open_braces.append(-1)
        elif token.lastgroup == "close" and open_braces:
            start = open_braces.pop()
            if start >= 0:
                found = text[start : token.start()].strip()  # a box around boxes closes last, so the outer one wins
    return found
