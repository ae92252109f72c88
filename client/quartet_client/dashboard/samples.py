"""A sampled completion, taken apart for people: what it thought, what it answered, what the reward service said."""

import re
from typing import Any

from quartet_client.models import Completion, Group

_MOST = 6000  # characters of a text that are shown; a model may write 100,000
_THOUGHT = re.compile(r"^(?P<thought>.*?)</think>(?P<answer>.*)$", re.DOTALL)
# What the reward service's outcomes mean to a reader; reward.proto defines them.
_RIGHT = "correct"


def sample_fields(group: Group) -> dict[str, Any]:
    """Return a finished group as the page shows it."""
    return {
        "id": group.instance_id,
        "prompt": _cut(group.prompt_text),
        "reference": _cut(group.answer),
        "purpose": group.purpose,
        "rollout": group.rollout_id,
        "at": group.finished_at.timestamp() if group.finished_at else None,
        "completions": [_completion(completion) for completion in group.completions],
    }


def _completion(completion: Completion) -> dict[str, Any]:
    thought, answer = split_thought(completion.text)
    score = completion.score
    return {
        "thought": _cut(thought),
        "answer": _cut(answer),
        "finish": completion.finish_reason,
        "tokens": completion.tokens,
        "versions": sorted({span.policy_version for span in completion.version_spans}),
        "reward": score.reward if score else None,
        "outcome": score.outcome if score else "",
        "right": bool(score and score.outcome == _RIGHT),
        "parsed": _cut(score.parsed_answer) if score else "",
        "reason": _cut(score.reason or score.failure) if score else "",
    }


def split_thought(text: str) -> tuple[str, str]:
    """Return what stands before </think>, without <think>, and what stands behind it.

    Without </think>, a text that begins with <think> was cut off while it thought; any other is all answer.
    """
    stripped = text.lstrip()
    opened = stripped.startswith("<think>")
    body = stripped.removeprefix("<think>")
    match = _THOUGHT.match(body)
    if match:
        return match["thought"].strip(), match["answer"].strip()
    return (body.strip(), "") if opened else ("", text.strip())


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]} … ({len(text) - _MOST:,} characters more)"
