"""Supervised fine-tuning: the learner, the checkpoints and the records of a run, without broker and rollouts.

A row is a group of one completion, whose loss is -log_prob (`quartet_trainer.algorithms.sft`): so a step is a step of
the learner, under every plugin. This module imports torch and is imported in the training thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.config import LoadedConfig
from quartet_common.durations import now_timestamp
from quartet_common.log import get_logger
from quartet_trainer.callbacks import Callbacks
from quartet_trainer.checkpointer import Checkpointer, EarlyStopping
from quartet_trainer.checkpoints import locked_folder
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control
from quartet_trainer.disk_space import DiskSpace
from quartet_trainer.learner.checks import check_model_folder
from quartet_trainer.learner.distributed import Announcements, shutdown
from quartet_trainer.learner.metrics import public_names
from quartet_trainer.loop import LOOK_SECONDS, PAUSED
from quartet_trainer.preflight import checkpoint_root
from quartet_trainer.records.journal import Journal, writing
from quartet_trainer.records.step_metrics import time_metrics
from quartet_trainer.sft_data import SftData, sft_config
from quartet_trainer.status import Status
from quartet_trainer.training_run import TrainerContext, leading, load_learner, start_callbacks

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # imports ColossalAI, which is patched first

log = get_logger(__name__)

_REPORTED = (
    *("train/loss", "train/entropy", "train/grad_norm", "train/update_skipped", "train/learning_rate", "train/router_"),
    *("batch/rows", "batch/trained_tokens", "batch/forward_tokens", "batch/micro_batches", "batch/padding_ratio"),
    "time/",
)
"""Metrics of a step that are of rows, too."""


def run_worker(config: LoadedConfig[TrainerSection], status: Status) -> None:
    """Run a rank above 0: load the model and follow rank 0 until the end of the training."""
    learner, _ = _load(config)
    learner.follow(Announcements(), status)
    shutdown()


def train(context: TrainerContext) -> str:
    """Run rank 0: train until all steps are done or the service is stopped. Return the reason, for the log.

    Raises:
        TrainingError, LearnerError, ConfigError: the training cannot start or continue.
        Stopped: the service was stopped while the training waited.
    """
    learner, data = _load(context.config)
    with leading(learner):
        return _train(context, learner, data)


def _load(config: LoadedConfig[TrainerSection]) -> tuple[Learner, SftData]:
    """Read the rows, whose number is the schedule's length, and load the model. Every rank does."""
    assert config.model.path is not None, "preflight checked it"
    data = SftData.read(config, check_model_folder(config.model.path))
    return load_learner(sft_config(config, data.steps)), data


def _train(context: TrainerContext, learner: Learner, data: SftData) -> str:
    """Create the loop's parts, train, and close them in reverse order."""
    config, settings, control, status = context.config, context.config.section, context.control, context.status
    folder, root = config.run.path, checkpoint_root(config)
    with contextlib.ExitStack() as parts:
        with writing(folder):  # 0700: rows may be confidential
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts.enter_context(locked_folder(root, control.wait))
        patience = EarlyStopping(settings.early_stop) if settings.early_stop.metric else None
        checkpointer = Checkpointer(
            root,
            settings.checkpoint,
            broker_pb2.Run(spec=broker_pb2.RunSpec(run_id=config.run.id)),
            learner,
            None,
            status,
            DiskSpace(control, status, idle=learner.idle),
            patience,
            on_durable=control.wake.set,
            data=data.digest(),
        )
        parts.callback(checkpointer.close)
        checkpointer.restore()
        status.session_epoch = 0  # from here on a stop has something to save
        context.ready()
        journal = Journal(folder, first_step=learner.step, tensorboard=settings.tensorboard)
        parts.callback(journal.close)
        callbacks = start_callbacks(context, learner.step, data.steps, parts)
        loop = SftLoop(settings, data, learner, checkpointer, journal, control, status, patience, callbacks)
        ending = loop.run()
        if ending != STOPPED:
            with checkpointer.checkpointing():
                checkpointer.space.until_written(
                    folder, lambda: learner.export(folder / "model"), learner.checkpoint_bytes // 3
                )
        return ending


ALL_DONE, EARLY_STOP, STOPPED = "all steps are done", "the evaluations have stopped getting better", "stopped"


@dataclass
class SftLoop:
    """The loop and its parts. It runs in one thread; another writes checkpoints."""

    settings: TrainerSection
    data: SftData
    learner: Learner
    checkpointer: Checkpointer
    journal: Journal
    control: Control
    status: Status
    patience: EarlyStopping | None
    callbacks: Callbacks
    _phase_seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> str:
        """Train, and save a checkpoint at the end. Return one of the endings above."""
        self.status.enter(trainer_pb2.TRAINER_PHASE_TRAINING)
        self._phase_seconds = self.status.phase_seconds()
        ending = self._train()
        if self.learner.step:
            self.checkpointer.save()
        return ending

    def _train(self) -> str:
        evaluation, interval = self.settings.evaluation, self.settings.checkpoint.interval
        while (step := self.learner.step) < self.data.steps:
            periodic = step > 0 and evaluation.interval > 0 and step % evaluation.interval == 0
            if (periodic or (step == 0 and evaluation.before_training)) and self._evaluate():
                return EARLY_STOP
            if not self._may_begin(step):
                return STOPPED
            self._step(step)
            if interval and self.learner.step % interval == 0:
                self.checkpointer.begin()
        if evaluation.at_end:
            self._evaluate()
        return STOPPED if self.control.stopping.is_set() else ALL_DONE

    def _may_begin(self, step: int) -> bool:
        """Answer requests and wait while the training is paused; return False when it is to stop."""
        while not self.control.stopping.is_set():
            self.control.wake.clear()
            self.checkpointer.settle()
            if self.control.checkpoint_requested:
                checkpoint = self.checkpointer.save()
                for request in self.control.take_checkpoint_requests():
                    request.set_result(checkpoint)
            if self.control.begin_step(step):
                self.status.wait_for("")
                return True
            with self.status.during(trainer_pb2.TRAINER_PHASE_PAUSED):
                self.status.wait_for(PAUSED)
                self.learner.idle()
                self.control.wake.wait(min(LOOK_SECONDS, self.control.pause_left))
        return False

    def _step(self, step: int) -> None:
        rows = self.data.batch(step)
        groups = [row.as_group() for row in rows]
        self.callbacks.batch(step, groups, [])
        learned = public_names(self.learner.train_step(groups))
        self.status.step, self.status.batches = step + 1, self.status.batches + 1
        before, self._phase_seconds = self._phase_seconds, self.status.phase_seconds()
        tokens = sum(row.token_ids.size for row in rows)
        times = time_metrics(before, self._phase_seconds, tokens, len(rows))
        metrics = {name: value for name, value in (learned | times).items() if name.startswith(_REPORTED)}
        metrics |= {
            "train/epoch": self.data.epoch(step + 1),
            "throughput/tokens_per_second": tokens / times["time/step"],
        }
        self.journal.step(step, metrics)
        self.status.record(trainer_pb2.WatchMetricsResponse(step=step, at=now_timestamp(), metrics=metrics))
        self.callbacks.update(step, metrics)
        log.info("step done", extra={"step": step, "loss": round(metrics["train/loss"], 4)})

    def _evaluate(self) -> bool:
        """Measure the loss of all sets; keep the best checkpoint. Return whether the training is to end early."""
        version = self.learner.step
        measured: dict[str, float] = {}
        for name in self.data.evaluation:
            total, count = 0.0, 0
            for rows in self.data.batches(name):
                if self.control.stopping.is_set():  # the training started again evaluates this version
                    return False
                log_probs = self.learner.log_probs([row.as_group() for row in rows])
                total, count = total - log_probs.sum().item(), count + log_probs.numel()
            own = {f"eval/{name}/loss": total / count, f"eval/{name}/tokens": float(count)}
            self.journal.evaluation(name, version, own)
            log.info("evaluation done", extra={"step": version, "set": name, "loss": round(total / count, 4)})
            measured |= own
        if not measured:
            return False
        self.callbacks.evaluation(version, measured)
        best = measured.get(self.settings.checkpoint.best_metric)
        if best is not None and version > 0:
            self.checkpointer.keep_if_best(self.settings.checkpoint.best_metric, best)
        watched = measured.get(self.settings.early_stop.metric)
        return watched is not None and self.patience is not None and self.patience.exhausted_by(version, watched)
