"""Evaluations: a stored set of prompts is answered by one policy version; no newer one is published meanwhile."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, trainer_pb2

from quartet_common.log import get_logger
from quartet_common.proportions import Answer, estimates, proportion
from quartet_common.text import visible
from quartet_common.verifier_scores import references, short_names, verifier_means, verifier_metrics
from quartet_trainer.config import EvaluationSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.errors import SessionLost
from quartet_trainer.members import Reporter
from quartet_trainer.records.journal import Journal, agent_fields, outcome_name, verifier_fields, writing
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status

log = get_logger(__name__)

_TEST_RESULTS = {
    reward_pb2.OUTCOME_INCORRECT: 0,
    reward_pb2.OUTCOME_MALFORMED: -2,
    reward_pb2.OUTCOME_COMPILE_ERROR: -2,
}


def evaluation_metrics(name: str, transcripts: Sequence[experience_pb2.GroupTranscript], dead: int) -> dict[str, float]:
    """Return `eval/{name}/…`: means over completions, and pass@k over prompts; accuracies over the judged answers.

    If prompts are dead, only the counts are returned: the remaining prompts are a biased sample.
    """
    completions = [completion for transcript in transcripts for completion in transcript.completions]
    prefix = f"eval/{name}"
    metrics = {f"{prefix}/prompts": float(len(transcripts)), f"{prefix}/dead": float(dead)}
    if dead or not completions:
        return metrics
    count = len(completions)
    metrics |= {
        f"{prefix}/reward": sum(c.score.reward for c in completions) / count,
        f"{prefix}/format_acc": sum(c.score.format_acc for c in completions) / count,
        f"{prefix}/response_length": sum(c.tokens for c in completions) / count,
        f"{prefix}/truncated_ratio": sum(c.finish_reason == experience_pb2.FINISH_REASON_LENGTH for c in completions)
        / count,
        **verifier_metrics((mean for each in transcripts for mean in verifier_means(each.completions)), f"{prefix}/"),
    }
    judged = [_answers(transcript) for transcript in transcripts]
    means = [(len(each), sum(accuracy for accuracy, _ in each) / len(each)) for each in judged if each]
    if (accuracy := proportion(means)) is None:
        return metrics
    quoted = {"ans_acc": accuracy} | estimates(judged)
    for part in {"avg@1", "maj@1"} & quoted.keys():  # of one completion these are its accuracy
        del quoted[part]
    for part, each in quoted.items():
        metrics |= {
            f"{prefix}/{part}": each.value,
            f"{prefix}/{part}_low": each.low,
            f"{prefix}/{part}_high": each.high,
        }
    return metrics | {f"{prefix}/judged": float(accuracy.judged)}


def _answers(transcript: experience_pb2.GroupTranscript) -> list[Answer]:
    """Return a prompt's judged completions; programs do not vote."""
    reference = transcript.instance.prompt.reference
    votes = not (reference.test_cases or reference.test_program)
    scores = [completion.score for completion in transcript.completions if not completion.score.unjudged]
    return [(score.ans_acc, score.parsed_answer if votes else "") for score in scores]


def metric_names(name: str, completions: int, verifiers: Sequence[str]) -> list[str]:
    """Return the names of `evaluation_metrics` for a set, its verifiers and `completions` of each prompt."""
    parts = ["ans_acc", "reward", "format_acc", "response_length", "truncated_ratio", "prompts", "dead", "pass@1"]
    if completions > 1:
        sizes = {1 << i for i in range(completions.bit_length())} | {completions}
        parts += [f"avg@{completions}", f"maj@{completions}", *(f"pass@{size}" for size in sorted(sizes))]
    own = [f"reward/{verifier}/{kind}" for verifier in short_names(verifiers) for kind in ("mean", "ans_acc")]
    return [f"eval/{name}/{part}" for part in dict.fromkeys((*parts, *own))]


def write_evaluation(folder: Path, name: str, step: int, transcripts: Sequence[experience_pb2.GroupTranscript]) -> Path:
    """Write `folder`/{name}-step-{step}.jsonl and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-step-{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for transcript in transcripts:
            for completion in transcript.completions:
                file.write(visible(json.dumps(_line(transcript, completion), ensure_ascii=False)) + "\n")
    return path


def _line(transcript: experience_pb2.GroupTranscript, completion: experience_pb2.CompletionInfo) -> dict[str, object]:
    reference, score = transcript.instance.prompt.reference, completion.score
    gold = {name: text for name, text in references(transcript).items() if name != "test_cases"}
    line: dict[str, object] = {
        "prompt": transcript.prompt_text,
        "prediction": completion.text,
        "gold": next(iter(gold.values()), "") if len(gold) < 2 else gold,
        "parsed": score.parsed_answer,
        "format_valid": score.format_acc,
        "ans_valid": None if score.unjudged else score.ans_acc,
        "response_length": completion.tokens,
        "reward": score.reward,
        "outcome": outcome_name(score.outcome),
        "reason": score.reason,
        "verifiers": verifier_fields(score),
        "prompt_id": transcript.instance.prompt.prompt_id,
        "policy_versions": sorted({span.policy_version for span in completion.version_spans}),
        **agent_fields(completion),
    }
    if reference.test_cases:
        line["test_cases"] = {
            "inputs": [case.input for case in reference.test_cases],
            "outputs": [case.output for case in reference.test_cases],
        }
        line["test_results"], line["test_metadata"] = _tests(score)
    return line


def _tests(score: reward_pb2.Score) -> tuple[list[int] | None, dict[str, object]]:
    """Return ColossalChat's list of test results, and metadata.

    The list ends with the first test that did not pass: 1 passed, 0 wrong, -1 an error or a limit, -2 not compiled. It
    is None if the verifier did not report how many tests passed before it.
    """
    tested = next((verifier for verifier in score.verifiers if verifier.tests), None)
    if tested is None:
        return None, {}
    metadata = {"outcome": outcome_name(tested.outcome), "reason": tested.reason, "tests": tested.tests}
    if not tested.HasField("tests_passed"):
        return None, metadata
    last = [] if tested.outcome == reward_pb2.OUTCOME_CORRECT else [_TEST_RESULTS.get(tested.outcome, -1)]
    return [1] * tested.tests_passed + last, metadata


WAIT_SECONDS = 5.0
# How long to wait for the client to submit the prompts of a set.
SET_SECONDS = 30.0


class RunEnded(Exception):
    """The run was ended by another process."""


@dataclass
class Evaluator:
    """Runs the configured evaluations. If one fails, its metrics are missing; the training goes on."""

    sets: list[str]
    settings: EvaluationSection
    folder: Path
    """For the JSONL file of each evaluation."""
    session: BrokerSession
    control: Control
    status: Status
    journal: Journal
    reporter: Reporter
    _last_version: int = -1

    def due(self, version: int, last: bool = False) -> bool:
        """Whether `version` must be evaluated; `last`: it is the final one."""
        if not self.sets or version == self._last_version:
            return False
        if last:
            return self.settings.at_end
        if version == 0:
            return self.settings.before_training
        return bool(self.settings.interval) and version % self.settings.interval == 0

    def run(self, version: int, keep_current: Callable[[], int]) -> dict[str, float]:
        """Evaluate all sets at `version` and return the metrics of the evaluations that completed.

        Args:
            keep_current: sends `version` to rollouts that lack it; returns how many have it.

        Raises:
            Stopped: the trainer was asked to stop.
            RunEnded: the run was ended.
        """
        with self.status.during(trainer_pb2.TRAINER_PHASE_EVALUATING):
            measured: dict[str, float] = {}
            for name in self.sets:
                measured |= self._run_set(name, version, keep_current)
        self._last_version = version
        return measured

    def _run_set(self, name: str, version: int, keep_current: Callable[[], int]) -> dict[str, float]:
        evaluation_id = self._start(name, version)
        if evaluation_id is None or not self._wait(evaluation_id, keep_current):
            return {}
        full = self.session.evaluation_results(evaluation_id)
        found = [data for data in full.transcripts if data]  # empty: it was deleted (RunSpec.result_ttl)
        transcripts, unreadable = [], len(full.transcripts) - len(found)
        for data in found:
            try:
                transcripts.append(experience_pb2.GroupTranscript.FromString(data))
            except DecodeError:
                unreadable += 1
        metrics = evaluation_metrics(name, transcripts, full.dead + unreadable)
        with writing(self.folder):
            path = write_evaluation(self.folder, name, version, transcripts)
        self.journal.evaluation(name, version, metrics)
        self.reporter.report(
            evaluation=broker_pb2.EvaluationFinished(evaluation_set=name, policy_version=version, metrics=metrics)
        )
        accuracy = metrics.get(f"eval/{name}/ans_acc")
        if full.dead or unreadable:
            self._warn(
                f"evaluation {evaluation_id} is incomplete: {full.finished - unreadable} of {full.prompts}; "
                f"{full.dead} are dead (quartet dead list) and the transcripts of {unreadable} cannot be read, so it "
                "has no result"
            )
        log.info("evaluated", extra={"set": name, "version": version, "ans_acc": accuracy, "path": str(path)})
        return metrics

    def _start(self, name: str, version: int) -> str | None:
        deadline = time.monotonic() + SET_SECONDS
        while (started := self._try_to_start(name, version)) is None:
            if time.monotonic() > deadline:
                self._warn(f"evaluation set '{name}' has no prompts; version {version} is not evaluated on it")
                return None
            self.control.wait(0.5)
        return started.evaluation_id

    def _try_to_start(self, name: str, version: int) -> broker_pb2.StartEvaluationResponse | None:
        try:
            return self.session.start_evaluation(name, version)
        except SessionLost:
            self._check_active()
            raise

    def _wait(self, evaluation_id: str, keep_current: Callable[[], int]) -> bool:
        """Wait until the evaluation is complete. Time in which no rollout has the version does not count."""
        left = self.settings.timeout_seconds
        while left > 0:
            self.control.wake.clear()
            if self.control.stopping.is_set():
                raise Stopped
            rollouts = keep_current()
            began = time.monotonic()
            answer = self.session.wait_for_evaluation(evaluation_id, min(WAIT_SECONDS, left))
            if answer is not None and answer.complete:
                return True
            self._check_active()
            if rollouts:
                left -= time.monotonic() - began
        self._warn(
            f"evaluation {evaluation_id} was not complete within {self.settings.timeout_seconds:g} s "
            "(trainer.evaluation.timeout_seconds); training goes on without it"
        )
        return False

    def _check_active(self) -> None:
        if self.session.run().state != broker_pb2.RUN_STATE_ACTIVE:
            raise RunEnded

    def _warn(self, why: str) -> None:
        log.warning(why)
        self.reporter.notice("warning", why)
