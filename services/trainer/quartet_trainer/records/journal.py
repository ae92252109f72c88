"""Writes metrics, samples and the rollout log into the run's folder."""

import contextlib
import json
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quartet.v1 import experience_pb2, reward_pb2

from quartet_common.ledger import append_whole
from quartet_common.log import get_logger
from quartet_common.text import one_line, visible
from quartet_common.verifier_scores import references, turns_text, verifier_text
from quartet_trainer.disk_space import is_full
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)

_dropped: set[Path] = set()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a TrainingError that names `path` and the reason.

    On a full disk what the block writes is dropped, with one warning: the training needs none of it.
    """
    try:
        yield
        _dropped.discard(path)
    except OSError as error:
        if is_full(error):
            if path not in _dropped:
                log.warning("the disk is full: what would be written to '%s' is dropped", path)
            _dropped.add(path)
            return
        reason = (error.strerror or str(error)).lower()
        raise TrainingError(
            f"cannot write '{path}': {reason}; started again, the trainer resumes from its last checkpoint"
        ) from error


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        append_whole(file, line.encode(), file.tell())


LONGEST_TEXT = 4000


def append_rollouts(
    path: Path, step: int, transcripts: Sequence[experience_pb2.GroupTranscript], most: int | None = 1
) -> None:
    """Append `{"train_step", "rollout", "scores"}` to a JSONL file: prompt and completion in one text, and its score.

    A step that is trained again after a restart is appended again.

    Args:
        transcripts: of the groups; those of groups without one have no completions.
        most: completions of each group; None: all.
    """
    shown = [(each, completion) for each in transcripts for completion in each.completions[:most]]
    texts = [each.prompt_text + completion.text for each, completion in shown]
    scores = [_score_fields(each, completion) for each, completion in shown]
    line = {"train_step": step, "rollout": texts, "scores": scores}
    _append(path, visible(json.dumps(line, ensure_ascii=False)) + "\n")


def _score_fields(group: experience_pb2.GroupTranscript, completion: experience_pb2.CompletionInfo) -> dict[str, Any]:
    score = completion.score
    return {
        "prompt_id": group.instance.prompt.prompt_id,
        "prompt_characters": len(group.prompt_text),
        "reward": score.reward,
        "ans_valid": None if score.unjudged else score.ans_acc,
        "outcome": outcome_name(score.outcome),
        "reason": score.reason,
        "references": references(group),
        "verifiers": verifier_fields(score),
        **agent_fields(completion),
    }


def agent_fields(completion: experience_pb2.CompletionInfo) -> dict[str, Any]:
    """Return what only agents have: the seat, the rewards of turns, and the conversations if there are several."""
    fields: dict[str, Any] = {}
    if completion.seat:
        fields |= {"seat": completion.seat, "episode": completion.episode}
    if any(rewards := turn_rewards(completion)):
        fields["turn_rewards"] = rewards
    if completion.rows:
        fields["conversations"] = [{"prompt": row.prompt_text, "text": row.text} for row in completion.rows]
    return fields


def turn_rewards(completion: experience_pb2.CompletionInfo) -> list[float | None]:
    """Return the rewards of its turns in the order of time; None for a turn without one."""
    return [turn.reward if turn.HasField("reward") else None for turn in completion.turn_infos]


def verifier_fields(score: reward_pb2.Score) -> list[dict[str, Any]]:
    """Return each verifier's part of a score; `weight` 0: unknown."""
    same = ("name", "reward", "weight", "reason")
    return [
        {name: getattr(one, name) for name in same} | {"outcome": outcome_name(one.outcome)} for one in score.verifiers
    ]


def write_sample(
    folder: Path, step: int, transcripts: Sequence[experience_pb2.GroupTranscript], keep_last: int = 0
) -> Path:
    """Write `folder`/step-NNNNNN.md and return its path. Remove all samples but the `keep_last` newest; 0: none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.md"
    parts = [f"# Samples of the batch of step {step}\n", *(_group(transcript) for transcript in transcripts)]
    path.write_text(visible("\n".join(parts)), encoding="utf-8")
    if keep_last:
        for old in sorted(folder.glob("step-*.md"), key=lambda each: (len(each.name), each.name))[:-keep_last]:
            old.unlink(missing_ok=True)
    return path


def _group(transcript: experience_pb2.GroupTranscript) -> str:
    prompt = transcript.instance.prompt
    name = transcript.instance.instance_id + (f" ({prompt.prompt_id})" if prompt.prompt_id else "")
    lines = [f"## {one_line(name)}", ""]
    lines += ["Prompt:", "", _block(transcript.prompt_text), ""]
    for column, text in references(transcript).items():
        lines += [one_line(f"Reference {column}: `{text[:LONGEST_TEXT]}`"), ""]
    for completion in transcript.completions:
        lines += [_heading(completion), "", _block(completion.text), ""]
    return "\n".join(lines)


def outcome_name(outcome: int) -> str:
    """Return e.g. "runtime_error"; the number if this release has no such outcome."""
    known = outcome in reward_pb2.Outcome.values()
    return reward_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower() if known else str(outcome)


def _heading(completion: experience_pb2.CompletionInfo) -> str:
    score = completion.score
    outcome = outcome_name(score.outcome).replace("_", " ")
    versions = ", ".join(f"v{span.policy_version}[{span.begin}:{span.end}]" for span in completion.version_spans)
    cut = ", cut off" if completion.finish_reason == experience_pb2.FINISH_REASON_LENGTH else ""
    why = f": {score.reason}" if score.reason else ""
    verifiers = [f"- {one_line(verifier_text(**each))}\n" for each in verifier_fields(score)]
    seat = f", seat {completion.seat} of episode {completion.episode}" if completion.seat else ""
    if turns := turns_text(turn_rewards(completion)):
        verifiers.append(f"- {turns}\n")
    return (
        f"### Completion {completion.index}{one_line(seat)}: reward {score.reward:g}, {outcome}{one_line(why)}\n\n"
        f"{completion.tokens} tokens{cut}; weights {versions or 'unknown'}; answer read: "
        + (f"`{one_line(score.parsed_answer)}`" if score.parsed_answer else "none")
        + "".join(["\n\n", *verifiers] if verifiers else ())
    )


def _block(text: str) -> str:
    more = len(text) - LONGEST_TEXT
    shown = text if more <= 0 else f"{text[:LONGEST_TEXT]}… ({more} more characters)"
    fence = "```"
    while fence in shown:
        fence += "`"
    return f"{fence}text\n{shown}\n{fence}"


class Journal:
    """Writes `folder`/metrics.jsonl and `folder`/tensorboard; first removes the records that will be written again."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = True):
        """`first_step`: the first step that will be written. Existing records from it on are removed."""
        self._path = path = folder / "metrics.jsonl"
        self._first_step = first_step
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            _keep(path, first_step + 1, lambda record: False)
            path.touch()
        self._writer: Any = None
        self._tensorboard = folder / "tensorboard" if tensorboard else None
        if self._tensorboard:
            threading.excepthook = _quiet_about_full_disks  # TensorBoard's thread tells its caller, too
            with writing(self._tensorboard):
                self._writer = _summary_writer(self._tensorboard, first_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics at `step`, the batch's number from 0."""
        self._write({"kind": "step", "step": step, "policy_version": step + 1}, step, metrics)

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's metrics at `version`, the number of steps in the weights.

        After a restart, the evaluation of the first version replaces its record from before the restart.
        """
        if version == self._first_step:
            with writing(self._path):
                _keep(self._path, version, lambda record: (record.get("set"), record["step"]) != (name, version))
        self._write({"kind": "evaluation", "set": name, "step": version, "policy_version": version}, version, metrics)

    def _write(self, head: dict[str, object], at: int, metrics: Mapping[str, float]) -> None:
        with writing(self._path):
            _append(self._path, json.dumps({**head, "time": round(time.time(), 3), **metrics}) + "\n")
        if self._tensorboard:
            with writing(self._tensorboard):
                writer, self._writer = self._writer or _summary_writer(self._tensorboard), None
                for name, value in metrics.items():
                    writer.add_scalar(name, value, at)
                self._writer = writer  # one that failed, as its thread has ended, is replaced at the next step

    def close(self) -> None:
        """Flush and close what is open."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a failed write has been reported
                self._writer.close()


def _summary_writer(folder: Path, first_step: int = 0) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step or None)


def _quiet_about_full_disks(arguments: threading.ExceptHookArgs) -> None:
    if not (isinstance(arguments.exc_value, OSError) and is_full(arguments.exc_value)):
        threading.__excepthook__(arguments)


def _keep(path: Path, since: int, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the records written with `since` or more steps in the weights, unless wanted, and what a kill cut off.

    The file has its records in the order of these steps. Read from its end, it may be long.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end, kept = len(content), b""
            while end:
                line = content[content.rfind(b"\n", 0, end - 1) + 1 : end]
                with contextlib.suppress(ValueError):
                    record = json.loads(line) if line.endswith(b"\n") else {}
                    if record and record["step"] + (record["kind"] == "step") < since:
                        break
                    kept = line + kept if record and wanted(record) else kept
                end -= len(line)
        file.seek(end)
        file.write(kept)
        file.truncate()
