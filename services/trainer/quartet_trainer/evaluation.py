"""Evaluations: a stored set of prompts answered by one policy version, while no newer one is published."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2, trainer_pb2

from quartet_common.log import get_logger
from quartet_trainer.config import EvaluationSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.records.disk import writing
from quartet_trainer.records.evaluations import evaluation_metrics, write_evaluation
from quartet_trainer.records.journal import Journal
from quartet_trainer.records.reporter import Reporter
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status

log = get_logger(__name__)

WAIT_SECONDS = 5.0
# The client that made the run is submitting the sets just now, or never will.
SET_SECONDS = 30.0


class RunEnded(Exception):
    """The run was ended by someone else."""


class Evaluator:
    """Runs the configured evaluations; an evaluation that does not come about costs its metrics, not the run."""

    def __init__(
        self,
        sets: Sequence[str],
        settings: EvaluationSection,
        folder: Path,
        session: BrokerSession,
        control: Control,
        status: Status,
        journal: Journal,
        reporter: Reporter,
    ):
        """`folder`: where the JSONL of each evaluation goes."""
        self._sets = list(sets)
        self._settings = settings
        self._folder = folder
        self._session = session
        self._control = control
        self._status = status
        self._journal = journal
        self._reporter = reporter
        self._last_version = -1

    def due(self, version: int, last: bool = False) -> bool:
        """Whether `version` is to be evaluated; `last`: it is the final one."""
        if not self._sets or version == self._last_version:
            return False
        if last:
            return self._settings.at_end
        if version == 0:
            return self._settings.before_training
        return bool(self._settings.interval) and version % self._settings.interval == 0

    def run(self, version: int, keep_current: Callable[[], int]) -> dict[str, float]:
        """Evaluate all sets at `version` and return the metrics of those that came about.

        Args:
            keep_current: brings late rollouts to `version`; returns how many have it.

        Raises:
            Stopped: asked to stop meanwhile.
            RunEnded: the run was ended meanwhile.
        """
        with self._status.during(trainer_pb2.TRAINER_PHASE_EVALUATING):
            measured: dict[str, float] = {}
            for name in self._sets:
                measured |= self._run_set(name, version, keep_current)
        self._last_version = version
        return measured

    def _run_set(self, name: str, version: int, keep_current: Callable[[], int]) -> dict[str, float]:
        evaluation_id = self._start(name, version)
        if evaluation_id is None or not self._wait(evaluation_id, keep_current):
            return {}
        full = self._session.evaluation_results(evaluation_id)
        transcripts, unreadable = [], 0
        for data in full.transcripts:
            try:
                transcripts.append(experience_pb2.GroupTranscript.FromString(data))
            except DecodeError:
                unreadable += 1
        metrics = evaluation_metrics(name, transcripts, full.dead + unreadable)
        with writing(self._folder):
            path = write_evaluation(self._folder, name, version, transcripts)
        self._journal.evaluation(name, version, metrics)
        self._reporter.report(
            evaluation=broker_pb2.EvaluationFinished(evaluation_set=name, policy_version=version, metrics=metrics)
        )
        accuracy = metrics.get(f"eval/{name}/ans_acc")
        if full.dead or unreadable:
            self._warn(
                f"evaluation {evaluation_id} is incomplete: {full.finished - unreadable} of {full.prompts}; "
                f"{full.dead} were set aside (quartet dead list), the transcripts of {unreadable} cannot be read, so "
                "there is no figure"
            )
        log.info("evaluated", extra={"set": name, "version": version, "ans_acc": accuracy, "path": str(path)})
        return metrics

    def _start(self, name: str, version: int) -> str | None:
        deadline = time.monotonic() + SET_SECONDS
        while (started := self._session.start_evaluation(name, version)) is None:
            if time.monotonic() > deadline:
                self._warn(f"evaluation set '{name}' has no prompts; version {version} is not evaluated on it")
                return None
            self._control.pause(0.5)
        return started.evaluation_id

    def _wait(self, evaluation_id: str, keep_current: Callable[[], int]) -> bool:
        """Wait until complete. Time in which no rollout has the version does not count."""
        left = self._settings.timeout_seconds
        while left > 0:
            self._control.wake.take()
            if self._control.stopping.is_set():
                raise Stopped
            rollouts = keep_current()
            began = time.monotonic()
            answer = self._session.wait_for_evaluation(evaluation_id, min(WAIT_SECONDS, left))
            if answer is not None and answer.complete:
                return True
            if self._session.run().state != broker_pb2.RUN_STATE_ACTIVE:
                raise RunEnded
            if rollouts:
                left -= time.monotonic() - began
        self._warn(
            f"evaluation {evaluation_id} was not complete within {self._settings.timeout_seconds:g} s "
            "(trainer.evaluation.timeout_seconds); training goes on without it"
        )
        return False

    def _warn(self, why: str) -> None:
        log.warning(why)
        self._reporter.notice("warning", why)
