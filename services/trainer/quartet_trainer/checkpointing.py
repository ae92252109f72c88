"""Durable states of the training and their place in the run: save, commit, tell, thin out; and the way back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.checkpoints import read_manifest
from quartet_common.durations import to_duration
from quartet_common.ledger import LEDGER_FILE, Ledger, LedgerError
from quartet_common.log import get_logger
from quartet_trainer.checkpoints import CheckpointFolder, checkpoint_folder, find_checkpoints, prune
from quartet_trainer.control import Stopped
from quartet_trainer.errors import TrainingError
from quartet_trainer.learner.base import Learner
from quartet_trainer.records.reporter import Reporter
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status

log = get_logger(__name__)


@dataclass
class Consumed:
    """Instance ids in the weights, by step, that a broker which lost the end of its log might offer again.

    Kept since the last commit but one: the loss may reach back over the last.
    """

    by_step: dict[int, list[str]] = field(default_factory=dict)
    last_commit: int = 0

    def add(self, step: int, instance_ids: list[str]) -> None:
        """The batch of `step` is in the weights."""
        self.by_step[step] = instance_ids

    def committed(self, step: int) -> None:
        """Steps below `step` are durable."""
        self.by_step = {at: ids for at, ids in self.by_step.items() if at >= self.last_commit}
        self.last_commit = step

    def ids(self) -> list[str]:
        """Return all of them, in order of step."""
        return [instance_id for step in sorted(self.by_step) for instance_id in self.by_step[step]]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {"by_step": self.by_step, "last_commit": self.last_commit}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Consumed":
        """Return what `to_json` gave."""
        return cls({int(step): list(ids) for step, ids in saved["by_step"].items()}, saved["last_commit"])


class Checkpointer:
    """Saves the learner with what a later life needs to go on."""

    def __init__(
        self,
        root: Path,
        keep_last: int,
        run: broker_pb2.Run,
        learner: Learner,
        session: BrokerSession,
        status: Status,
    ):
        self._root = root
        self._keep_last = keep_last
        self._run = run
        self._learner = learner
        self._session = session
        self._status = status
        self._last: trainer_pb2.Checkpoint | None = None
        self._ledger = Ledger(root / LEDGER_FILE)
        self.consumed = Consumed()

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
        manifest = (newest and read_manifest(newest.path)) or {}
        with self._writing_ledger():
            self._ledger.rewind(manifest.get("ledger"))

    def _load(self, newest: CheckpointFolder) -> None:
        state = self._learner.load(newest.path)
        theirs, ours = (state["run_id"], state["run_created_at"]), self._identity()
        if theirs != ours:
            raise TrainingError(
                f"the checkpoints in '{self._root}' are of run '{theirs[0]}' created at {theirs[1]}, this is run "
                f"'{ours[0]}' created at {ours[1]}: choose another run.folder, or move them away"
            )
        self.consumed = Consumed.from_json(state["consumed"])
        self._last = as_message(newest)
        self._status.step = self._status.checkpoint_step = newest.step
        log.info("going on from checkpoint", extra={"step": newest.step, "path": str(newest.path)})

    def trained(self, step: int, instance_ids: list[str]) -> None:
        """Record that the batch of `step` is in the weights, which the broker knows. Raises TrainingError."""
        self.consumed.add(step, instance_ids)
        with self._writing_ledger():
            self._ledger.append(step, instance_ids)

    def save(self, reporter: Reporter) -> trainer_pb2.Checkpoint:
        """Save the present step unless it is saved already, commit it, remove old ones. Returns the checkpoint."""
        step = self._learner.step
        if self._last is not None and self._last.step == step:
            return self._last
        began = time.perf_counter()
        with self._status.during(trainer_pb2.TRAINER_PHASE_CHECKPOINTING):
            folder = checkpoint_folder(self._root, step)
            run_id, created_at = self._identity()
            identity = {"run_id": run_id, "run_created_at": created_at}
            with self._writing_ledger():
                mark = self._ledger.mark()  # on disk before the checkpoint that carries it
            state = {**identity, "consumed": self.consumed.to_json()}
            self._learner.save(folder, state, {**identity, "ledger": mark})
            self._commit(step)
            removed = prune(self._root, self._keep_last)
        checkpoint = trainer_pb2.Checkpoint(
            step=step, path=str(folder), elapsed=to_duration(time.perf_counter() - began)
        )
        checkpoint.saved_at.GetCurrentTime()
        self._last = checkpoint
        self._status.checkpoint_step = step
        reporter.report(checkpoint=broker_pb2.CheckpointSaved(step=step, path=str(folder)))
        log.info("checkpoint saved", extra={"step": step, "path": str(folder), "removed": len(removed)})
        return checkpoint

    def _commit(self, step: int) -> None:
        try:
            self._session.commit(step)
        except Stopped:
            # Durable, and the next life says so in OpenSession.
            log.warning("the broker is away: checkpoint is not committed yet", extra={"step": step})
        else:
            self.consumed.committed(step)

    @contextmanager
    def _writing_ledger(self) -> Iterator[None]:
        try:
            yield
        except LedgerError as error:
            raise TrainingError(f"the newest checkpoint and its ledger do not belong together: {error}") from error
        except OSError as error:
            raise TrainingError(f"cannot write the ledger '{self._root / LEDGER_FILE}': {error}") from error

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    def _identity(self) -> tuple[str, str]:
        return self._run.spec.run_id, self._run.created_at.ToJsonString()


def as_message(found: CheckpointFolder) -> trainer_pb2.Checkpoint:
    """Return a checkpoint on disk as the contract's message; how long it took is not known any more."""
    checkpoint = trainer_pb2.Checkpoint(step=found.step, path=str(found.path))
    checkpoint.saved_at.FromNanoseconds(round(found.saved_at * 1e9))
    return checkpoint
