"""The life of a training, as prose: read `TrainingLoop.run` first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from quartet.v1 import broker_pb2, experience_pb2, trainer_pb2

from quartet_common.durations import now_timestamp, to_duration
from quartet_common.log import get_logger
from quartet_trainer.batches import ExperienceError
from quartet_trainer.checkpointing import Checkpointer
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.distribute import Alone, Ensemble
from quartet_trainer.dynamic_sampling import DynamicSampling
from quartet_trainer.errors import TrainingError
from quartet_trainer.evaluation import Evaluator, RunEnded
from quartet_trainer.publisher import Published, Publisher
from quartet_trainer.records.journal import Journal
from quartet_trainer.records.reporter import Reporter
from quartet_trainer.records.samples import write_sample
from quartet_trainer.records.step_metrics import batch_metrics, public_names, time_metrics
from quartet_trainer.session import Batch, BrokerSession
from quartet_trainer.status import Status

log = get_logger(__name__)

NO_ROLLOUT = "a rollout to join the run"


class Ending(Enum):
    """Why a training ends."""

    MAX_STEPS = "all steps are done"
    """run.max_steps is reached: the run is finished."""
    END_OF_DATA = "the prompts have ended"
    """No batch will come any more: the run is finished."""
    RUN_ENDED = "the run was ended"
    """By someone else, e.g. cancelled."""
    STOPPED = "the trainer was asked to stop"
    """The run stays open; another life goes on from the checkpoint."""

    @property
    def complete(self) -> bool:
        """Whether the training did what it was to do."""
        return self in (Ending.MAX_STEPS, Ending.END_OF_DATA)


@dataclass
class TrainingLoop:
    """The loop and its parts. All of it happens in one thread, which nothing else blocks."""

    settings: TrainerSection
    max_steps: int
    """0: until the prompts end."""
    folder: Path
    """The run's folder."""
    learner: Alone | Ensemble
    session: BrokerSession
    sampling: DynamicSampling
    publisher: Publisher
    checkpointer: Checkpointer
    evaluator: Evaluator
    journal: Journal
    reporter: Reporter
    control: Control
    status: Status
    _last_batch: bool = False
    _phase_seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> Ending:
        """Train until the run is over or the trainer is asked to stop; then leave everything durable."""
        ending = self._train()
        log.info("training ends: %s", ending.value, extra={"step": self.learner.step})
        if self.learner.step > 0:
            self.checkpointer.save(self.reporter)
        if ending.complete:
            self._finish(ending)
        return ending

    def _train(self) -> Ending:
        self._phase_seconds = self.status.phase_seconds()
        self.status.enter(trainer_pb2.TRAINER_PHASE_TRAINING)  # but for the phases inside it
        try:
            while not self._all_steps_done():
                if self.evaluator.due(self.learner.step):
                    self.evaluator.run(self.learner.step, self._keep_current)
                batch = self._next_batch()
                if isinstance(batch, Ending):
                    if batch.complete:
                        self._evaluate_at_end()
                    return batch
                self._step(batch)
            self._evaluate_at_end()
            return Ending.END_OF_DATA if self._last_batch else Ending.MAX_STEPS
        except Stopped:
            return Ending.STOPPED
        except RunEnded:
            return Ending.RUN_ENDED

    def _all_steps_done(self) -> bool:
        return self._last_batch or 0 < self.max_steps <= self.learner.step

    def _next_batch(self) -> Batch | Ending:
        """Wait for the batch of this step, keeping rollouts current and answering requests meanwhile."""
        with self.status.during(trainer_pb2.TRAINER_PHASE_WAITING_FOR_BATCH):
            while True:
                self.control.attention.take()
                if self.control.stopping.is_set():
                    return Ending.STOPPED
                self._answer_checkpoint_requests()
                self._keep_current()
                batch = self.session.lease(self.learner.step)
                if batch is None:
                    continue  # called away: someone came, or asked for something
                if batch.manifest.granted:
                    self.status.wait_for("")
                    if self.sampling.filter(self.learner.step, batch):
                        continue  # some groups teach nothing: others will take their place
                    self._last_batch = batch.manifest.end_of_data
                    return batch
                if batch.manifest.run_finished:
                    return Ending.RUN_ENDED
                if batch.manifest.end_of_data:
                    return Ending.END_OF_DATA

    def _step(self, batch: Batch) -> None:
        """Train on a batch, hand out the new weights, say what happened, and save if it is time."""
        step = self.learner.step
        groups = [experience_pb2.GroupTensors.FromString(group.tensors) for group in batch.groups]
        try:
            learned = public_names(self.learner.train_step(groups))
        except ExperienceError as error:
            raise TrainingError(f"the batch of step {step} cannot be trained: {error}") from error
        self.session.mark_trained(step)
        self.checkpointer.trained(step, list(batch.manifest.instance_ids))
        self.status.step, self.status.batches = step + 1, self.status.batches + 1
        published = self._publish()
        measured = batch_metrics(step, groups, [group.header for group in batch.groups]) | self.sampling.metrics()
        self._report(step, {**learned, **measured, **self._costs(published, learned)})
        self._sample(step, batch.groups)
        interval = self.settings.checkpoint.interval
        if interval and self.learner.step % interval == 0:
            self.checkpointer.save(self.reporter)
        self._answer_checkpoint_requests()

    def _keep_current(self) -> int:
        """Bring late and healed rollouts to this version. Returns how many rollouts have it."""
        self.learner.idle()
        self._publish()
        rollouts = self.publisher.current(self.learner.step)
        self.status.wait_for("" if rollouts else NO_ROLLOUT)
        return rollouts

    def _publish(self) -> Published | None:
        version = self.learner.step
        if not self.publisher.behind(version):
            return None
        with self.status.during(trainer_pb2.TRAINER_PHASE_PUBLISHING):
            published = self.publisher.publish(version, self.learner.weights)
        self.status.group_epoch = self.publisher.epoch
        if published is None:
            return None
        for failure in published.failures:
            self.reporter.notice("warning", f"weight update to version {version}: {failure}")
        if published.rollouts:
            self.status.published_version = version
            self.reporter.report(
                weights=broker_pb2.WeightsPublished(
                    policy_version=version,
                    group_epoch=published.epoch,
                    rollouts=published.rollouts,
                    bytes=published.bytes,
                    elapsed=to_duration(published.elapsed),
                )
            )
        return published

    def _costs(self, published: Published | None, learned: dict[str, float]) -> dict[str, float]:
        """Return time per phase since the last step's report, and what the weight update came to."""
        before, self._phase_seconds = self._phase_seconds, self.status.phase_seconds()
        costs = time_metrics(
            before, self._phase_seconds, learned["batch/completion_tokens"], learned["batch/completions"]
        )
        costs["weights/rollouts"] = float(published.rollouts if published else 0)
        if published:
            costs["weights/seconds"] = published.elapsed
            costs["weights/bytes"] = float(published.bytes)
            costs["weights/failures"] = float(len(published.failures))
        return costs

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self.journal.step(step, metrics)
        self.status.record(trainer_pb2.WatchMetricsResponse(step=step, at=now_timestamp(), metrics=metrics))
        self.reporter.report(step=broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics=metrics))
        shown = {name: round(metrics[f"reward/{name}"], 4) for name in ("mean", "ans_acc")}
        log.info("step done", extra={"step": step, "reward": shown["mean"], "ans_acc": shown["ans_acc"]})

    def _sample(self, step: int, groups: Sequence[experience_pb2.ExperienceGroup]) -> None:
        if self.settings.samples_interval and step % self.settings.samples_interval == 0:
            shown = [group.transcript for group in groups[: self.settings.samples_groups]]
            write_sample(
                self.folder / "samples", step, [experience_pb2.GroupTranscript.FromString(data) for data in shown]
            )
            self.reporter.report(sample=broker_pb2.GroupSample(transcript=shown[0]))

    def _answer_checkpoint_requests(self) -> None:
        for request in self.control.take_checkpoint_requests():
            request.set_result(self.checkpointer.save(self.reporter))

    def _evaluate_at_end(self) -> None:
        if self.evaluator.due(self.learner.step, last=True):
            self.evaluator.run(self.learner.step, self._keep_current)

    def _finish(self, ending: Ending) -> None:
        """Leave the model as a plain Hugging Face folder and end the run."""
        self.learner.export(self.folder / "model")
        self.session.finish(f"{ending.value}: {self.learner.step} steps trained")
