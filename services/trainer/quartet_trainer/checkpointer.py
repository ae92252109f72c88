"""Saves checkpoints, commits their steps at the broker, prunes old ones, and resumes from the newest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.durations import to_duration
from quartet_common.ledger import LEDGER_FILE, Ledger, LedgerError, Mark, settlement, sync
from quartet_common.log import get_logger
from quartet_trainer.checkpoints import CheckpointFolder, checkpoint_folder, find_checkpoints, prune
from quartet_trainer.config import CheckpointSection, EarlyStopSection
from quartet_trainer.control import Stopped
from quartet_trainer.disk_space import DiskSpace, is_full
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.members import Reporter
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # torch, which the servicer must not wait for

log = get_logger(__name__)

BEST_FILE = "best.json"
SLOWEST_DISK = 10e6
"""Bytes per second; a disk that is slower counts as one that does not answer."""


@dataclass(frozen=True)
class Best:
    """The best value of an evaluation metric so far, and its checkpoint."""

    metric: str
    value: float
    step: int
    """Optimizer steps in the weights that were evaluated."""


def better(value: float, than: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better by more than `min_delta` (>= 0); `mode`: "max" or "min"."""
    return value > than + min_delta if mode == "max" else value < than - min_delta


def read_best(root: Path) -> Best | None:
    """Return what `write_best` wrote under `root`; None if the file is missing or cannot be read."""
    try:
        return Best(**json.loads((root / BEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_best(root: Path, best: Best) -> None:
    """Write `root`/best.json atomically and durably. Raises OSError."""
    aside = root / f".{BEST_FILE}.writing"
    aside.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
    sync(aside)
    aside.replace(root / BEST_FILE)
    sync(root)


@dataclass
class EarlyStopping:
    """Counts evaluations without improvement. Its state is saved in the checkpoint."""

    settings: EarlyStopSection
    best: float | None = None
    bad: int = 0
    last_step: int = -1

    def exhausted_by(self, step: int, value: float) -> bool:
        """Count the evaluation of `step`, once; return whether patience is exhausted."""
        if step > self.last_step:
            self.last_step = step
            if self.best is None or better(value, self.best, self.settings.mode, self.settings.min_delta):
                self.best, self.bad = value, 0
            else:
                self.bad += 1
        return self.bad >= self.settings.patience

    def to_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {**self._measure(), "best": self.best, "bad": self.bad, "last_step": self.last_step}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `to_json` returned, unless it is of another metric or mode."""
        if all(saved.get(key, value) == value for key, value in self._measure().items()):  # earlier releases saved none
            self.best, self.bad, self.last_step = saved["best"], saved["bad"], saved["last_step"]

    def _measure(self) -> dict[str, str]:
        return {"metric": self.settings.metric, "mode": self.settings.mode}


@dataclass
class _Writing:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    began: float
    done: Future[None]


class Checkpointer:
    """Saves the learner's state and what a restarted trainer needs besides.

    A thread writes a copy in memory while training goes on; one checkpoint at a time. Steps are committed when their
    checkpoint is durable. Call all methods from the loop's thread only.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSection,
        run: broker_pb2.Run,
        learner: Learner,
        session: BrokerSession | None,
        status: Status,
        space: DiskSpace,
        patience: EarlyStopping | None,
        on_durable: Callable[[], None],
        data: str = "",
    ):
        """Write nothing yet.

        Args:
            session: None: there is no broker, and so neither commits nor a ledger.
            patience: early stopping, whose state is saved and restored; None: not configured.
            on_durable: called on the writing thread when a checkpoint has been written; then call `settle`.
            data: without a broker, a digest of the data, which a resumed training must have again.
        """
        self._root = root
        self._settings = settings
        self._run = run
        self._learner = learner
        self._session = session
        self._status = status
        self.space = space
        self._patience = patience
        self._on_durable = on_durable
        self._data = data
        self._last: trainer_pb2.Checkpoint | None = None
        self._writing: _Writing | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._ledger = Ledger(root / LEDGER_FILE)
        self._unwritten: list[tuple[int, list[str]]] = []
        """Batches that are in the weights and not yet in the ledger."""
        self._mark: Mark | None = None
        self._first_remembered_pass = 0
        self.best: Best | None = None

    def restore(self) -> None:
        """Load the newest complete checkpoint, if there is one, and cut the ledger off at its position.

        Raises:
            TrainingError: the checkpoint is of another run or older than the run's last commit, or the ledger does not
                belong to it.
        """
        found = find_checkpoints(self._root)
        newest = found[-1] if found else None
        if newest is not None:
            self._load(newest)
        committed, ours = self._run.committed_step, self._learner.step
        if committed > ours:
            raise TrainingError(
                f"run '{self._run.spec.run_id}' has {committed} committed steps, but the newest checkpoint in "
                f"'{self._root}' has {ours}: restore the newer checkpoint, or start another run"
            )
        manifest = newest.manifest if newest else {}
        self._mark = manifest.get("ledger")
        self._first_remembered_pass = manifest.get("first_remembered_pass", 0)
        if self._session is not None:
            self.space.until_written(self._root, self._rewind_ledger)
        self.best = read_best(self._root)
        if self.best is not None and (
            self.best.step not in {checkpoint.step for checkpoint in found}
            or self.best.metric != self._settings.best_metric
        ):
            self.best = None  # its checkpoint is missing, or another metric is configured now
        self._prune()  # a writer that was killed may have left more than there is space for

    def _rewind_ledger(self) -> None:
        with self._writing_ledger():
            self._ledger.rewind(self._mark)

    def open_session(self) -> None:
        """Open a session, and send the broker the ledger's steps that its books lack.

        Raises:
            TrainingError: the broker refuses, or the ledger lacks those steps or contradicts the books.
            Stopped: the trainer was asked to stop.
        """
        assert self._session is not None, "a training without a broker has none to open"
        step, books = self._learner.step, self._run.policy_version
        answer = self._session.open(step, self._first_remembered_pass)
        if books < step:
            log.warning(
                f"books at step {books}, checkpoint at step {step}: Redis was restored from an earlier state, or lost "
                "the end of its log, or the run was rolled back; the ledger's steps are settled first"
            )
        if not answer.HasField("settle_from_step"):
            if books < step:
                raise TrainingError(
                    f"this broker is of an earlier release, which takes no ledger: groups of the steps {books} to "
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
            if self._data and theirs.get("data"):
                raise TrainingError(
                    f"the checkpoints in '{self._root}' are of other rows, or of another sft.rows_per_step, shuffle or "
                    "shuffle_seed: restore these, choose another run.id, or move the checkpoints away"
                )
            raise TrainingError(
                f"the checkpoints in '{self._root}' are of run '{theirs.get('run_id')}' created at "
                f"{theirs.get('run_created_at')}, this is run '{ours['run_id']}' created at {ours['run_created_at']}: "
                "choose another run.folder, or move them away"
            )
        self._learner.load(newest.path)
        if self._patience and theirs.get("early_stop"):
            self._patience.restore(theirs["early_stop"])
        self._last = as_message(newest)
        self._status.checkpointed(self._last)
        self._status.step = newest.step
        log.info("resuming from checkpoint", extra={"step": newest.step, "path": str(newest.path)})

    def trained(self, step: int, instance_ids: list[str]) -> None:
        """Append the batch of `step`, which is in the weights, to the ledger. Raises TrainingError, Stopped."""
        self._unwritten.append((step, instance_ids))
        self.space.until_written(self._root, self._write_ledger)

    def _write_ledger(self) -> None:
        with self._writing_ledger():
            while self._unwritten:
                self._ledger.append(*self._unwritten[0])
                del self._unwritten[0]

    def save(self, reporter: Reporter | None = None) -> trainer_pb2.Checkpoint:
        """Save the current step unless it is saved already, and wait until it is durable and committed."""
        self.begin(reporter)
        self.settle(reporter, wait=True)
        assert self._last is not None, "a checkpoint was just written"
        return self._last

    def begin(self, reporter: Reporter | None = None) -> None:
        """Start saving the current step, unless it is saved or being written. Waits for the checkpoint before."""
        step = self._learner.step
        if self._writing and self._writing.step == step:
            return
        self.settle(reporter, wait=True)
        if self._last and self._last.step == step:
            return
        with self.checkpointing():
            self._writing = self.space.until_written(self._root, self._start, self._learner.checkpoint_bytes)
        self.settle(reporter)

    def checkpointing(self) -> AbstractContextManager[None]:
        """The phase, which may take the time that a slow disk needs for a checkpoint."""
        allowed = self._learner.checkpoint_bytes / SLOWEST_DISK
        return self._status.during(trainer_pb2.TRAINER_PHASE_CHECKPOINTING, allowed)

    def _start(self, wait: bool = False) -> _Writing:
        step = self._learner.step
        began, folder = time.perf_counter(), checkpoint_folder(self._root, step)
        mark: Mark | None = None
        if self._session is not None:
            self._write_ledger()
            with self._writing_ledger():
                mark = self._ledger.mark()  # syncs the ledger to disk before the checkpoint that refers to it
        facts = {
            **self._identity(),
            "ledger": mark,
            "first_remembered_pass": self._first_remembered_pass,
            "max_staleness": self._run.spec.max_staleness,  # for `rollback`
            "early_stop": self._patience and self._patience.to_json(),
        }
        done = self._executor.submit(self._learner.snapshot(folder, facts))
        done.add_done_callback(lambda _: self._on_durable())
        if wait:
            done.result()
        return _Writing(step, folder, began, done)

    def settle(self, reporter: Reporter | None = None, wait: bool = False) -> None:
        """Commit the checkpoint if it has been written, and prune old ones. With `wait`, wait until it is written.

        Raises:
            LearnerError: it could not be written. On a full disk, the current step's is written in its place, once
                there is space.
            Stopped: see `DiskSpace`.
        """
        writing = self._writing
        if writing is None or not (wait or writing.done.done()):
            return
        with self.checkpointing():
            self._writing = None
            try:
                writing.done.result()
            except LearnerError as error:
                if not is_full(error):
                    raise
                needed = self._learner.checkpoint_bytes
                writing = self.space.until_written(self._root, lambda: self._start(wait=True), needed)
            self._commit(writing.step)
            removed = self._prune()
        checkpoint = trainer_pb2.Checkpoint(
            step=writing.step, path=str(writing.folder), elapsed=to_duration(time.perf_counter() - writing.began)
        )
        checkpoint.saved_at.GetCurrentTime()
        self._last = checkpoint
        self._status.checkpointed(checkpoint)
        if reporter is not None:
            reporter.report(checkpoint=broker_pb2.CheckpointSaved(step=writing.step, path=str(writing.folder)))
        log.info("checkpoint saved", extra={"step": writing.step, "path": str(writing.folder), "removed": len(removed)})

    def keep_if_best(self, metric: str, value: float, reporter: Reporter | None = None) -> None:
        """Save the current step and keep its checkpoint if `value` is the best so far of `checkpoint.best_metric`."""
        if self.best is not None and not better(value, self.best.value, self._settings.best_mode):
            return
        step = self._learner.step
        self.save(reporter)
        self.best = Best(metric, value, step)
        best = self.best
        try:
            self.space.until_written(self._root, lambda: write_best(self._root, best))
        except OSError as error:
            raise TrainingError(f"cannot write '{self._root / BEST_FILE}': {error}") from error
        log.info("best so far", extra={"step": step, metric: value})
        self._prune()

    def _prune(self) -> list[CheckpointFolder]:
        try:
            return prune(self._root, self._settings.keep_last, keep={self.best.step} if self.best else ())
        except OSError as error:  # the new checkpoint is durable; the next call tries again
            log.warning("old checkpoints cannot be removed: %s", error)
            return []

    def _commit(self, step: int) -> None:
        if self._session is None:
            return
        try:
            answer = self._session.commit(step)
        except Stopped:
            # The checkpoint is durable; a restarted trainer reports it in OpenSession.
            log.warning("checkpoint is not committed yet: the broker is unavailable", extra={"step": step})
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
        """Wait for the checkpoint that is being written, and close the ledger."""
        self._executor.shutdown(wait=True)
        self._ledger.close()

    def _identity(self) -> dict[str, str]:
        known = {"run_id": self._run.spec.run_id, "run_created_at": self._run.created_at.ToJsonString()}
        return known | ({"data": self._data} if self._data else {})


def as_message(found: CheckpointFolder) -> trainer_pb2.Checkpoint:
    """Return a checkpoint on disk as a message, without `elapsed`."""
    checkpoint = trainer_pb2.Checkpoint(step=found.step, path=str(found.path))
    checkpoint.saved_at.FromNanoseconds(round(found.saved_at * 1e9))
    return checkpoint
