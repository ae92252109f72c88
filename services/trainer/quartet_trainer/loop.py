"""The training loop: read `TrainingLoop.run` first."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from quartet.v1 import broker_pb2, experience_pb2, trainer_pb2

from quartet_common.durations import now_timestamp, to_duration
from quartet_common.log import get_logger
from quartet_trainer import launch
from quartet_trainer.callbacks import Callbacks
from quartet_trainer.checkpointer import Checkpointer, EarlyStopping
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.data import BatchFetcher, Fetched
from quartet_trainer.errors import InvalidGroupsError
from quartet_trainer.evaluation import Evaluator, RunEnded
from quartet_trainer.learner.metrics import public_names
from quartet_trainer.members import Reporter
from quartet_trainer.observation import RolloutObserver
from quartet_trainer.outcome import judge
from quartet_trainer.records.flat import STEPS, FlatRewards
from quartet_trainer.records.journal import Journal, append_rollouts, write_sample, writing
from quartet_trainer.records.step_metrics import batch_metrics, device_metrics, time_metrics, update_metrics
from quartet_trainer.records.traces import GroupTraces
from quartet_trainer.session import BrokerSession
from quartet_trainer.sleep import RolloutSleep
from quartet_trainer.status import Status
from quartet_trainer.weight_sync.publisher import Published, Publisher

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # imports ColossalAI, which is patched first

log = get_logger(__name__)

NO_ROLLOUT = "a rollout to join the run"
PAUSED = "Resume: the training is paused"
_LOGGED = {"reward": "reward/mean", "ans_acc": "reward/ans_acc"}
# How often, while waiting for a batch, rollouts in backoff after a failed update are tried again.
LOOK_SECONDS = 2.0


class Ending(Enum):
    """Why the training ends."""

    MAX_STEPS = "all steps are done"
    """run.max_steps is reached: the run is finished."""
    END_OF_DATA = "the prompts have ended"
    """There will be no further batch: the run is finished."""
    EARLY_STOP = "the evaluations have stopped getting better"
    """trainer.early_stop: the run is finished."""
    INVALID_GROUPS = "no group can be trained"
    """trainer.max_invalid_groups in a row were invalid: the run is finished, and has failed."""
    RUN_ENDED = "the run was ended"
    """By another process, e.g. cancelled by the client."""
    STOPPED = "the trainer was asked to stop"
    """The run stays active; a restarted trainer resumes from the checkpoint."""

    @property
    def complete(self) -> bool:
        """Whether this ending also ends the run."""
        return self in _RECORDED


# The RunEnding that the broker records for an ending that ends the run.
_RECORDED = {
    Ending.MAX_STEPS: broker_pb2.RUN_ENDING_MAX_STEPS,
    Ending.END_OF_DATA: broker_pb2.RUN_ENDING_DATA,
    Ending.EARLY_STOP: broker_pb2.RUN_ENDING_EARLY_STOP,
    Ending.INVALID_GROUPS: broker_pb2.RUN_ENDING_INVALID_GROUPS,
}


@dataclass
class TrainingLoop:
    """The loop and its parts. All decisions are made in one thread.

    While a step is trained, other threads fetch the next batch, send the previous weights to the rollouts and write a
    checkpoint.
    """

    settings: TrainerSection
    max_steps: int
    """0: no limit."""
    folder: Path
    """The run's folder."""
    learner: Learner
    session: BrokerSession
    batches: BatchFetcher
    publisher: Publisher
    sleep: RolloutSleep
    observer: RolloutObserver
    checkpointer: Checkpointer
    evaluator: Evaluator
    journal: Journal
    reporter: Reporter
    control: Control
    status: Status
    traces: GroupTraces
    flat: FlatRewards
    patience: EarlyStopping | None = None
    """None: no early stopping."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    _last_batch: bool = False
    _failure: str = ""
    """Why the run has failed; "" unless it has."""
    _stopped_early: bool = False
    _updates: list[Published] = field(default_factory=list)
    """Weight updates that ended since the last step was reported."""
    _phase_seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> Ending:
        """Train until the run is over or the trainer is asked to stop; then save a checkpoint."""
        ending = self._train()
        log.info("training ends: %s", ending.value, extra={"step": self.learner.step})
        self.batches.close()
        self._collect_update(wait=True)
        try:
            if self.learner.step > 0:
                self.checkpointer.save(self.reporter)
            if ending.complete:
                self._finish(ending)
        except Stopped:
            why = "the broker is unavailable, or the disk full"
            log.warning("what is not saved or finished yet will be by the trainer started again: %s", why)
            return Ending.STOPPED
        return ending

    def _train(self) -> Ending:
        self._phase_seconds = self.status.phase_seconds()
        weights = self.settings.weights
        allowed = weights.timeout_seconds * weights.sleep_rollouts
        self.status.enter(trainer_pb2.TRAINER_PHASE_TRAINING, allowed)  # the phases below interrupt it
        try:
            while not self._all_steps_done():
                if self.evaluator.due(self.learner.step):
                    self._evaluate()
                    if self._stopped_early:
                        return Ending.EARLY_STOP
                fetched = self._next_batch()
                if isinstance(fetched, Ending):
                    if fetched.complete:
                        self._evaluate_at_end()
                    return fetched
                self._step(fetched)
            self._evaluate_at_end()
            return Ending.END_OF_DATA if self._last_batch else Ending.MAX_STEPS
        except Stopped:
            return Ending.STOPPED
        except InvalidGroupsError as error:
            self._failure = str(error)
            return Ending.INVALID_GROUPS
        except RunEnded:
            return Ending.RUN_ENDED

    def _all_steps_done(self) -> bool:
        return self._last_batch or 0 < self.max_steps <= self.learner.step

    def _next_batch(self) -> Fetched | Ending:
        """Wait for the batch of this step; meanwhile update rollouts that lack the weights, and answer requests."""
        step = self.learner.step
        self.batches.ask(step)
        fetched: Fetched | None = None
        with self.status.during(trainer_pb2.TRAINER_PHASE_WAITING_FOR_BATCH):
            while True:
                self.control.wake.clear()
                if self.control.stopping.is_set():
                    return Ending.STOPPED
                self._settle()
                if self.control.paused:
                    self._stay_paused()
                    continue
                fetched = fetched or self.batches.take(step)
                if fetched is not None:
                    if not fetched.manifest.granted or self.control.begin_step(step):
                        break
                    continue
                self._keep_current()
                self.control.wake.wait(LOOK_SECONDS)
        self.status.wait_for("")
        if fetched.manifest.granted:
            self._last_batch = fetched.manifest.end_of_data
            return fetched
        return Ending.RUN_ENDED if fetched.manifest.run_finished else Ending.END_OF_DATA

    def _stay_paused(self) -> None:
        """Wait, paused, until the next wake-up; update rollouts that lack the weights meanwhile."""
        with self.status.during(trainer_pb2.TRAINER_PHASE_PAUSED):
            self._keep_current()
            self.status.wait_for(PAUSED)
            self.control.wake.wait(min(LOOK_SECONDS, self.control.pause_left))
        if not self.control.paused:
            self.status.wait_for("")

    def _step(self, fetched: Fetched) -> None:
        """Train on a batch, publish the new weights, report, and start a checkpoint if one is due."""
        step, groups = self.learner.step, fetched.groups
        if self.settings.prefetch and not self._last_batch and not 0 < self.max_steps <= step + 1:
            self.batches.ask(step + 1)
        if self.settings.weights.sleep_rollouts:
            self._collect_update(wait=True)
            assert not self.publisher.under_way, "an update is under way"
        with self.sleep.during() as awake, self.traces.step(step, groups):
            for name, why in awake.items():
                self.reporter.notice("warning", f"{name} does not sleep while step {step} is trained: {why}")
            self.callbacks.batch(step, fetched.tensors, groups)
            learned = public_names(self.learner.train_step(fetched.tensors))
            # First the ledger: if a stop ends the call below, the checkpoint that is saved then has this step.
            self.checkpointer.trained(step, list(fetched.manifest.instance_ids))
            self.session.mark_trained(step, fetched.manifest.instance_ids)
        self.status.step, self.status.batches = step + 1, self.status.batches + 1
        self._publish()
        measured = batch_metrics(step, fetched.tensors, [group.header for group in groups]) | fetched.metrics
        peak = self.settings.peak_tflops
        measured |= device_metrics(learned, self.learner.parameters if peak else 0, launch.world_size(), peak)
        metrics = {**learned, **measured, **self._costs(learned)}
        self._report(step, metrics)
        self._sample(step, groups)
        self._watch_rewards(groups)
        self.callbacks.update(step, metrics)
        interval = self.settings.checkpoint.interval
        if interval and self.learner.step % interval == 0:
            self.checkpointer.begin(self.reporter)
        self._settle()

    def _settle(self) -> None:
        """Commit a checkpoint that has been written, and answer checkpoint requests."""
        self.checkpointer.settle(self.reporter)
        if self.control.checkpoint_requested:
            checkpoint = self.checkpointer.save(self.reporter)
            for request in self.control.take_checkpoint_requests():
                request.set_result(checkpoint)

    # Weights

    def _keep_current(self) -> None:
        """Collect an update that has ended; start one for rollouts that joined or recovered. Does not wait for it."""
        self.learner.idle()
        self._collect_update()
        if not self.publisher.under_way:
            self._begin_update()
        if not self.publisher.under_way:
            self.status.wait_for("" if self.publisher.current(self.learner.step) else NO_ROLLOUT)

    def _bring_all(self) -> int:
        """Send this version to every rollout that lacks it, and wait. Return how many rollouts have it."""
        self._settle()
        self.learner.idle()
        self._publish()
        self._collect_update(wait=True)
        rollouts = self.publisher.current(self.learner.step)
        self.status.wait_for("" if rollouts else NO_ROLLOUT)
        return rollouts

    def _publish(self) -> None:
        """Start sending the version just trained, once the previous update has ended."""
        self._collect_update(wait=True)
        self._begin_update()

    def _begin_update(self) -> None:
        with self.status.during(trainer_pb2.TRAINER_PHASE_PUBLISHING, self.publisher.seconds):
            self.publisher.begin(self.learner.step, self.learner.weights)
        self._collect_update()

    def _collect_update(self, wait: bool = False) -> None:
        """Report the update under way if it has ended; with `wait`, wait for its end."""
        if not self.publisher.under_way:
            return
        with self.status.during(trainer_pb2.TRAINER_PHASE_PUBLISHING, self.publisher.seconds):
            published = self.publisher.collect(wait)
        if self.publisher.under_way:
            return
        self.status.group_epoch = self.publisher.epoch
        if published is None:
            return
        self._updates.append(published)
        for failure in published.failures:
            self.reporter.notice("warning", f"weight update to version {published.version}: {failure}")
        if published.rollouts:
            self.status.published_version = published.version
            self.traces.published(published.version, published.rollouts, published.elapsed)
            self.reporter.report(
                weights=broker_pb2.WeightsPublished(
                    policy_version=published.version,
                    group_epoch=published.epoch,
                    rollouts=published.rollouts,
                    bytes=published.bytes,
                    elapsed=to_duration(published.elapsed),
                )
            )

    # Records

    def _costs(self, learned: dict[str, float]) -> dict[str, float]:
        """Return metrics since the last step's report: time per phase, weight updates, the rollouts' idle time."""
        before, self._phase_seconds = self._phase_seconds, self.status.phase_seconds()
        updates, self._updates = self._updates, []
        return (
            time_metrics(before, self._phase_seconds, learned["batch/completion_tokens"], learned["batch/completions"])
            | update_metrics(updates)
            | self.observer.metrics()
        )

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self.journal.step(step, metrics)
        self.status.record(trainer_pb2.WatchMetricsResponse(step=step, at=now_timestamp(), metrics=metrics))
        self.reporter.report(step=broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics=metrics))
        shown = {name: round(metrics[key], 4) for name, key in _LOGGED.items() if key in metrics}
        log.info("step done", extra={"step": step, "version": step + 1, **shown})

    def _sample(self, step: int, groups: list[experience_pb2.ExperienceGroup]) -> None:
        if self.settings.samples_interval and step % self.settings.samples_interval == 0:
            shown = [group.transcript for group in groups[: self.settings.samples_groups]]
            samples = [experience_pb2.GroupTranscript.FromString(data) for data in shown]
            with writing(self.folder / "samples"):
                write_sample(self.folder / "samples", step, samples, self.settings.samples_keep_last)
            self.callbacks.samples(step, samples)
            self.reporter.report(sample=broker_pb2.GroupSample(transcript=shown[0]))
        if self.settings.rollout_log_interval and step % self.settings.rollout_log_interval == 0:
            with writing(self.folder / "rollouts.jsonl"):
                transcripts = [experience_pb2.GroupTranscript.FromString(group.transcript) for group in groups]
                most = 1 if self.settings.rollout_log_completions == "first" else None
                append_rollouts(self.folder / "rollouts.jsonl", step, transcripts, most)

    def _watch_rewards(self, groups: list[experience_pb2.ExperienceGroup]) -> None:
        """Say once, after the first steps, that the rewards are flat; the status does while they are."""
        distillation = self.settings.distillation
        if distillation.coefficient and not distillation.reward_weight:
            return  # rewards are reported only
        if self.flat.steps and not self.flat.sentence():
            return
        self.flat.add([experience_pb2.GroupTranscript.FromString(group.transcript) for group in groups])
        warning = self.flat.sentence() if self.flat.steps >= STEPS or self._all_steps_done() else ""
        if warning and not self.status.warning:
            log.warning(warning, extra={"step": self.learner.step})
            self.reporter.notice("warning", warning)
        self.status.warning = warning

    # Evaluations

    def _evaluate(self) -> None:
        """Evaluate the current version; keep its checkpoint if it is the best, and check for early stopping."""
        version = self.learner.step
        measured = self.evaluator.run(version, self._bring_all)
        self.callbacks.evaluation(version, measured)
        best = self._watched("checkpoint.best_metric", self.settings.checkpoint.best_metric, measured)
        if best is not None and version > 0:
            self.checkpointer.keep_if_best(self.settings.checkpoint.best_metric, best, self.reporter)
        watched = self._watched("early_stop.metric", self.settings.early_stop.metric, measured)
        if watched is not None and self.patience is not None:
            self._stopped_early = self.patience.exhausted_by(version, watched)

    def _watched(self, key: str, metric: str, measured: dict[str, float]) -> float | None:
        """Return the metric that the run file names for `key`. Warn if a complete evaluation lacks it, as happens for
        ans_acc when no answer was judged."""
        prefix = "/".join(metric.split("/")[:2])
        if metric not in measured and f"{prefix}/reward" in measured:
            there = ", ".join(name for name in measured if name.startswith(f"{prefix}/"))
            self.reporter.notice("warning", f"trainer.{key}: the evaluation has no {metric}; it has {there}")
        return measured.get(metric)

    def _evaluate_at_end(self) -> None:
        if self.evaluator.due(self.learner.step, last=True):
            self._evaluate()

    def _finish(self, ending: Ending) -> None:
        """Export the trained model as a Hugging Face folder and end the run."""
        steps = self.learner.step
        if steps > 0:
            with self.checkpointer.checkpointing():
                self.checkpointer.space.until_written(
                    self.folder, lambda: self.learner.export(self.folder / "model"), self.learner.checkpoint_bytes // 3
                )
        state, reason = judge(ending.value, steps, self.session.run(), self.session.dead, self._failure)
        if warning := self.flat.sentence():
            reason = f"{reason}; {warning}"
        if state == broker_pb2.RUN_STATE_FAILED:
            log.error("the run has failed: %s", reason, extra={"step": steps})
        self.session.finish(state, reason, _RECORDED[ending], steps)
