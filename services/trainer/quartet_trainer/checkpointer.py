"""Durable states of the training and their place in the run: save, commit, tell, thin out; and the way back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.durations import to_duration
from quartet_common.ledger import LEDGER_FILE, Ledger, LedgerError, Mark, settlement
from quartet_common.log import get_logger
from quartet_trainer.checkpoints import CheckpointFolder, checkpoint_folder, find_checkpoints, prune
from quartet_trainer.config import CheckpointSection, EarlyStopSection
from quartet_trainer.control import Stopped
from quartet_trainer.errors import TrainingError
from quartet_trainer.members import Reporter
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # torch, which the servicer must not wait for

log = get_logger(__name__)

BEST_FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """The best value so far and the checkpoint that has it."""

    metric: str
    value: float
    step: int
    """Optimizer steps in the weights that were evaluated."""


def better(value: float, than: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better by more than `min_delta` (>= 0); `mode`: "max" or "min"."""
    return value > than + min_delta if mode == "max" else value < than - min_delta


def read_best(root: Path) -> Best | None:
    """What `write_best` wrote under `root`; None if there is nothing, or nothing that can be read."""
    try:
        return Best(**json.loads((root / BEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_best(root: Path, best: Best) -> None:
    """Write `root`/best.json, whole or not at all. Raises OSError."""
    aside = root / f".{BEST_FILE}.writing"
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(best)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, root / BEST_FILE)


@dataclass
class EarlyStopping:
    """Counts evaluations without improvement; its state belongs into the checkpoint."""

    settings: EarlyStopSection
    best: float | None = None
    bad: int = 0
    last_step: int = -1

    def exhausted_by(self, step: int, value: float) -> bool:
        """Take in the evaluation of `step`; True if it was one too many. The same step counts once."""
        if step > self.last_step:
            self.last_step = step
            if self.best is None or better(value, self.best, self.settings.mode, self.settings.min_delta):
                self.best, self.bad = value, 0
            else:
                self.bad += 1
        return self.bad >= self.settings.patience

    def to_json(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        return {"best": self.best, "bad": self.bad, "last_step": self.last_step}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to what `to_json` gave."""
        self.best, self.bad, self.last_step = saved["best"], saved["bad"], saved["last_step"]


@dataclass
class _Writing:
    """A checkpoint on its way to the disk."""

    step: int
    folder: Path
    began: float
    done: Future[None]


class Checkpointer:
    """Saves the learner with what a restarted trainer needs to go on.

    A copy in memory is written by a thread while training goes on; at most one at a time. A checkpoint counts, and its
    steps are committed, when it is durable. All methods are for the loop's thread.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSection,
        run: broker_pb2.Run,
        learner: Learner,
        session: BrokerSession,
        status: Status,
        patience: EarlyStopping | None,
        on_durable: Callable[[], None],
    ):
        """Take the parts.

        Args:
            patience: early stopping, which goes on as it stood in the checkpoint; None: there is none.
            on_durable: called, in the writing thread, when a checkpoint is written: `settle` has something to do.
        """
        self._root = root
        self._settings = settings
        self._run = run
        self._learner = learner
        self._session = session
        self._status = status
        self._patience = patience
        self._on_durable = on_durable
        self._last: trainer_pb2.Checkpoint | None = None
        self._writing: _Writing | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._ledger = Ledger(root / LEDGER_FILE)
        self._mark: Mark | None = None
        self._first_remembered_pass = 0
        self.best: Best | None = None

    def restore(self) -> None:
        """Load the newest complete checkpoint, if there is one, and go back to its place in the ledger.

        Raises:
            TrainingError: it is another run's, or older than what the run has committed, or the ledger is not its own.
        """
        found = find_checkpoints(self._root)
        newest = found[-1] if found else None
        if newest is not None:
            self._load(newest)
        committed, ours = self._run.committed_step, self._learner.step
        if committed > ours:
            raise TrainingError(
                f"run '{self._run.spec.run_id}' has {committed} committed steps, but the newest checkpoint in "
                f"'{self._root}' has {ours}: bring that checkpoint back, or start another run"
            )
        manifest = newest.manifest if newest else {}
        self._mark = manifest.get("ledger")
        self._first_remembered_pass = manifest.get("first_remembered_pass", 0)
        with self._writing_ledger():
            self._ledger.rewind(self._mark)
        self.best = read_best(self._root)
        if self.best is not None and (
            self.best.step not in {checkpoint.step for checkpoint in found}
            or self.best.metric != self._settings.best_metric
        ):
            self.best = None  # its checkpoint was never complete, or it is of another setting

    def open_session(self) -> None:
        """Become the run's trainer, and bring the broker's books up to the checkpoint from its ledger.

        Raises:
            TrainingError: the broker refuses, or the ledger lacks what the books do, or is of another history.
            Stopped: asked to stop meanwhile.
        """
        step, books = self._learner.step, self._run.policy_version
        answer = self._session.open(step, self._first_remembered_pass)
        if books < step:
            log.warning(
                f"books at step {books}, checkpoint at step {step}: Redis was restored from an earlier state, or lost "
                "the end of its log; the ledger's steps are settled before anything is trained"
            )
        if not answer.HasField("settle_from_step"):
            if books < step:
                raise TrainingError(
                    f"this broker is of an earlier release and takes no ledger: groups of the steps {books} to "
                    f"{step - 1} would be trained again. Upgrade the broker, and start again"
                )
            return
        with self._writing_ledger():
            path = self._root / LEDGER_FILE
            for lines in settlement(path, self._mark, answer.settle_from_step, step, answer.ledger_digest):
                self._session.settle(lines)

    def _load(self, newest: CheckpointFolder) -> None:
        theirs, ours = newest.manifest, self._identity()
        if {key: theirs.get(key) for key in ours} != ours:
            raise TrainingError(
                f"the checkpoints in '{self._root}' are of run '{theirs.get('run_id')}' created at "
                f"{theirs.get('run_created_at')}, this is run '{ours['run_id']}' created at {ours['run_created_at']}: "
                "choose another run.folder, or move them away"
            )
        self._learner.load(newest.path)
        if self._patience and theirs.get("early_stop"):
            self._patience.restore(theirs["early_stop"])
        self._last = as_message(newest)
        self._status.step = self._status.checkpoint_step = newest.step
        log.info("going on from checkpoint", extra={"step": newest.step, "path": str(newest.path)})

    def trained(self, step: int, instance_ids: list[str]) -> None:
        """Record that the batch of `step` is in the weights, which the broker knows. Raises TrainingError."""
        with self._writing_ledger():
            self._ledger.append(step, instance_ids)

    def save(self, reporter: Reporter) -> trainer_pb2.Checkpoint:
        """Save the present step unless it is saved already; returns when it is durable and committed."""
        self.begin(reporter)
        self.settle(reporter, wait=True)
        assert self._last is not None, "a checkpoint was just written"
        return self._last

    def begin(self, reporter: Reporter) -> None:
        """Begin to save the present step, unless it is saved or on its way. Waits for the one before."""
        step = self._learner.step
        if (self._writing and self._writing.step == step) or (self._last and self._last.step == step):
            return
        self.settle(reporter, wait=True)
        with self._status.during(trainer_pb2.TRAINER_PHASE_CHECKPOINTING):
            began, folder = time.perf_counter(), checkpoint_folder(self._root, step)
            with self._writing_ledger():
                mark = self._ledger.mark()  # on disk before the checkpoint that carries it
            facts = {
                **self._identity(),
                "ledger": mark,
                "first_remembered_pass": self._first_remembered_pass,
                "early_stop": self._patience and self._patience.to_json(),
            }
            done = self._executor.submit(self._learner.snapshot(folder, facts))
            done.add_done_callback(lambda _: self._on_durable())
            self._writing = _Writing(step, folder, began, done)
        self.settle(reporter)

    def settle(self, reporter: Reporter, wait: bool = False) -> None:
        """Commit the checkpoint that became durable, remove old ones; with `wait`, also one still being written.

        Raises:
            LearnerError: it could not be written.
        """
        writing = self._writing
        if writing is None or not (wait or writing.done.done()):
            return
        with self._status.during(trainer_pb2.TRAINER_PHASE_CHECKPOINTING):
            self._writing = None
            writing.done.result()
            self._commit(writing.step)
            removed = self._prune()
        checkpoint = trainer_pb2.Checkpoint(
            step=writing.step, path=str(writing.folder), elapsed=to_duration(time.perf_counter() - writing.began)
        )
        checkpoint.saved_at.GetCurrentTime()
        self._last = checkpoint
        self._status.checkpoint_step = writing.step
        reporter.report(checkpoint=broker_pb2.CheckpointSaved(step=writing.step, path=str(writing.folder)))
        log.info("checkpoint saved", extra={"step": writing.step, "path": str(writing.folder), "removed": len(removed)})

    def keep_if_best(self, metric: str, value: float, reporter: Reporter) -> None:
        """Save the present step, and keep it, if `value` is the best yet of `checkpoint.best_metric`."""
        if self.best is not None and not better(value, self.best.value, self._settings.best_mode):
            return
        step = self._learner.step
        self.save(reporter)
        self.best = Best(metric, value, step)
        try:
            write_best(self._root, self.best)
        except OSError as error:
            raise TrainingError(f"cannot write '{self._root / BEST_FILE}': {error}") from error
        log.info("best so far", extra={"step": step, metric: value})
        self._prune()

    def _prune(self) -> list[CheckpointFolder]:
        return prune(self._root, self._settings.keep_last, keep={self.best.step} if self.best else ())

    def _commit(self, step: int) -> None:
        try:
            answer = self._session.commit(step)
        except Stopped:
            # Durable, and the restarted trainer says so in OpenSession.
            log.warning("the broker is away: checkpoint is not committed yet", extra={"step": step})
        else:
            self._first_remembered_pass = max(self._first_remembered_pass, answer.first_remembered_pass)

    @contextmanager
    def _writing_ledger(self) -> Iterator[None]:
        try:
            yield
        except LedgerError as error:
            raise TrainingError(f"the newest checkpoint and its ledger do not belong together: {error}") from error
        except OSError as error:
            raise TrainingError(f"cannot write the ledger '{self._root / LEDGER_FILE}': {error}") from error

    def close(self) -> None:
        """Wait for what is being written, close the ledger."""
        self._executor.shutdown(wait=True)
        self._ledger.close()

    def _identity(self) -> dict[str, str]:
        return {"run_id": self._run.spec.run_id, "run_created_at": self._run.created_at.ToJsonString()}


def as_message(found: CheckpointFolder) -> trainer_pb2.Checkpoint:
    """Return a checkpoint on disk as the contract's message; how long it took is not known any more."""
    checkpoint = trainer_pb2.Checkpoint(step=found.step, path=str(found.path))
    checkpoint.saved_at.FromNanoseconds(round(found.saved_at * 1e9))
    return checkpoint
