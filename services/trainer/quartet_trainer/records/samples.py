"""What the policy says in training: readable samples, and a log in ColossalChat's form."""

import json
from collections.abc import Sequence
from pathlib import Path

from quartet.v1 import experience_pb2, reward_pb2

from quartet_common.text import one_line, visible

LONGEST_TEXT = 4000


def append_rollouts(path: Path, step: int, transcripts: Sequence[experience_pb2.GroupTranscript]) -> None:
    """Append `{"train_step", "rollout"}` to a JSONL file: of each group the prompt and its first completion.

    A step that is trained again after a resume stands there again, further down.
    """
    # A transcript is for people: who puts experience may leave it out.
    texts = [told.prompt_text + told.completions[0].text for told in transcripts if told.completions]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(visible(json.dumps({"train_step": step, "rollout": texts}, ensure_ascii=False)) + "\n")


def write_sample(folder: Path, step: int, transcripts: Sequence[experience_pb2.GroupTranscript]) -> Path:
    """Write `folder`/step-NNNNNN.md and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.md"
    parts = [f"# Samples of the batch of step {step}\n", *(_group(transcript) for transcript in transcripts)]
    path.write_text(visible("\n".join(parts)), encoding="utf-8")
    return path


def _group(transcript: experience_pb2.GroupTranscript) -> str:
    prompt = transcript.instance.prompt
    name = transcript.instance.instance_id + (f" ({prompt.prompt_id})" if prompt.prompt_id else "")
    lines = [f"## {one_line(name)}", ""]
    lines += ["Prompt:", "", _block(transcript.prompt_text), ""]
    if prompt.reference.answer:
        lines += [one_line(f"Reference answer: `{prompt.reference.answer}`"), ""]
    for completion in transcript.completions:
        lines += [_heading(completion), "", _block(completion.text), ""]
    return "\n".join(lines)


def outcome_name(outcome: int) -> str:
    """Return e.g. "runtime_error"; its number where this release has no such outcome."""
    known = outcome in reward_pb2.Outcome.values()
    return reward_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower() if known else str(outcome)


def _heading(completion: experience_pb2.CompletionInfo) -> str:
    score = completion.score
    outcome = outcome_name(score.outcome).replace("_", " ")
    versions = ", ".join(f"v{span.policy_version}[{span.begin}:{span.end}]" for span in completion.version_spans)
    cut = ", cut off" if completion.finish_reason == experience_pb2.FINISH_REASON_LENGTH else ""
    why = f": {score.reason}" if score.reason else ""
    return (
        f"### Completion {completion.index}: reward {score.reward:g}, {outcome}{one_line(why)}\n\n"
        f"{completion.tokens} tokens{cut}; weights {versions or 'unknown'}; answer read: "
        + (f"`{one_line(score.parsed_answer)}`" if score.parsed_answer else "none")
    )


def _block(text: str) -> str:
    more = len(text) - LONGEST_TEXT
    shown = text if more <= 0 else f"{text[:LONGEST_TEXT]}… ({more} more characters)"
    fence = "```"
    while fence in shown:
        fence += "`"
    return f"{fence}text\n{shown}\n{fence}"
