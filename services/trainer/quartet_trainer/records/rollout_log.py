"""The rollout log: what the policy says in training, one line of JSON every so many steps, in ColossalChat's form."""

import json
from collections.abc import Sequence
from pathlib import Path

from quartet.v1 import experience_pb2

from quartet_common.text import visible


def append_rollouts(path: Path, step: int, transcripts: Sequence[experience_pb2.GroupTranscript]) -> None:
    """Append `{"train_step", "rollout"}` to a JSONL file: of each group the prompt and its first completion.

    A step that is trained again after a resume stands there again, further down.
    """
    # A transcript is for people: who puts experience may leave it out.
    texts = [told.prompt_text + told.completions[0].text for told in transcripts if told.completions]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(visible(json.dumps({"train_step": step, "rollout": texts}, ensure_ascii=False)) + "\n")
