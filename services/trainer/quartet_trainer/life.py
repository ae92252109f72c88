"""One life of the training: the learner loaded, the run found, the loop and its parts put together and taken down.

All of it happens in the training thread; this module imports torch and is itself imported there.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.channel import connect_sync
from quartet_common.config import LoadedConfig, split_address
from quartet_common.diagnosis import Peer
from quartet_trainer import launch
from quartet_trainer.callbacks import Callbacks, TrainingFacts, check_callbacks
from quartet_trainer.checkpointing import Checkpointer
from quartet_trainer.checkpoints.best import Patience
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.distribute import Announcements, DistributedLearner, LocalLearner, worker_loop
from quartet_trainer.dynamic_sampling import DynamicSampling
from quartet_trainer.errors import TrainingError
from quartet_trainer.evaluation import Evaluator
from quartet_trainer.fetching import BatchFetcher
from quartet_trainer.handout import WeightHandout
from quartet_trainer.invalid_groups import InvalidGroups
from quartet_trainer.learner import Learner, create_learner
from quartet_trainer.learner.distributed import shutdown
from quartet_trainer.loop import TrainingLoop
from quartet_trainer.members import Members
from quartet_trainer.observation import RolloutObserver
from quartet_trainer.publisher import Publisher
from quartet_trainer.publisher.store import WeightStore, interface_address
from quartet_trainer.randomness import random_state, restore_random_state
from quartet_trainer.records.disk import writing
from quartet_trainer.records.group_traces import GroupTraces
from quartet_trainer.records.journal import Journal
from quartet_trainer.records.reporter import Reporter
from quartet_trainer.records.trace import Trace
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status


@dataclass(frozen=True)
class Surroundings:
    """What the service gives to the training."""

    config: LoadedConfig[TrainerSection]
    checkpoint_root: Path
    evaluation_sets: list[str]
    instance_id: str
    me: Callable[[], broker_pb2.Member]
    """This trainer as a member, as it is now."""
    control: Control
    status: Status


def follow_rank_0(config: LoadedConfig[TrainerSection]) -> None:
    """Be a rank above 0, from loading the model to the end of the training."""
    worker_loop(_load(config), Announcements())
    shutdown()


def live(around: Surroundings) -> str:
    """Be rank 0: train until the run is over or the service is stopped. Returns why it ended, in words.

    Raises:
        TrainingError, LearnerError, ConfigError: one sentence for a person.
    """
    config, control, status = around.config, around.control, around.status
    channel = connect_sync(config.addresses.broker, config.security, service="broker")
    session = BrokerSession(
        channel,
        Peer("broker", config.addresses.broker, config.security),
        run_id=config.run.id,
        holder=around.instance_id,
        control=control,
        status=status,
        patience=config.section.broker_timeout_seconds,
    )
    loaded = _load(config)
    learner = DistributedLearner(loaded, Announcements()) if launch.world_size() > 1 else LocalLearner(loaded)
    try:
        status.enter(trainer_pb2.TRAINER_PHASE_WAITING_FOR_BROKER)
        run = session.wait_for_run(while_waiting=learner.idle)
        status.made_by = run.made_by
        status.enter(trainer_pb2.TRAINER_PHASE_STARTING)
        if run.state != broker_pb2.RUN_STATE_ACTIVE:
            state = broker_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
            return f"run '{config.run.id}' has {state} already"
        return _train(around, session, learner, run)
    except Stopped:
        return "stopped before the training began"
    finally:
        with contextlib.suppress(TrainingError):  # ranks that are gone need not be told
            learner.stop()
        shutdown()
        channel.close()


def _train(
    around: Surroundings, session: BrokerSession, learner: LocalLearner | DistributedLearner, run: broker_pb2.Run
) -> str:
    settings, control, status = around.config.section, around.control, around.status
    checkpointer = Checkpointer(
        around.checkpoint_root,
        settings.checkpoint,
        run,
        learner,
        session,
        status,
        on_durable=control.attention.call_for,
    )
    with contextlib.ExitStack() as parts:
        parts.callback(checkpointer.close)
        folder = around.config.run.path
        with writing(folder):  # prompts and completions are for its user alone
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        checkpointer.lock(control.pause)
        checkpointer.restore()
        patience = _patience(settings, checkpointer)
        if "random" in checkpointer.restored:
            restore_random_state(checkpointer.restored["random"])
        checkpointer.extra["random"] = random_state
        checkpointer.open_session()
        status.session_epoch = session.epoch
        return _run_loop(around, session, learner, run, checkpointer, patience, parts)


def _patience(settings: TrainerSection, checkpointer: Checkpointer) -> Patience | None:
    """Early stopping as it stands in the checkpoint; None if the run is not ended early."""
    if not settings.early_stop.metric:
        return None
    patience = Patience(settings.early_stop.mode, settings.early_stop.patience, settings.early_stop.min_delta)
    if "early_stop" in checkpointer.restored:
        patience.restore(checkpointer.restored["early_stop"])
    checkpointer.extra["early_stop"] = patience.to_json
    return patience


def _run_loop(
    around: Surroundings,
    session: BrokerSession,
    learner: LocalLearner | DistributedLearner,
    run: broker_pb2.Run,
    checkpointer: Checkpointer,
    patience: Patience | None,
    parts: contextlib.ExitStack,
) -> str:
    """Put the parts together, each closed again by `parts`, and train."""
    config, settings, control, status = around.config, around.config.section, around.control, around.status
    folder = config.run.path
    closing = threading.Event()
    journal = Journal(folder, first_step=learner.step, tensorboard=settings.tensorboard)
    parts.callback(journal.close)
    reporter = Reporter(session.stub, config.run.id, around.instance_id)
    parts.callback(reporter.close)
    members = Members(
        session.stub,
        config.run.id,
        around.me,
        heartbeat_seconds=run.spec.member_ttl.ToTimedelta().total_seconds() / 3,
        on_change=control.attention.call_for,
    )
    members.start()
    parts.callback(members.close)
    if settings.weights.interface and not settings.weights.store_host:
        store_host = interface_address(settings.weights.interface)
    else:
        store_host = settings.weights.store_host or split_address(config.addresses.trainer)[0]
    publisher = Publisher(
        config.run.id,
        settings.weights,
        WeightStore(store_host, settings.weights.store_port),
        members,
        config.security,
        specs=learner.weight_specs(),
        stopping=lambda: control.stopping.is_set() or closing.is_set(),
        folder=folder / "weights",
        lora=getattr(learner, "lora", None),
    )
    trace = _trace(settings, folder, status, parts)
    handout = WeightHandout(
        publisher,
        learner,
        settings.weights.overlap,
        settings.weights.sleep_rollouts,
        on_end=control.attention.call_for,
        on_sent=partial(trace.span, "weights") if trace else None,
    )
    parts.callback(handout.close)
    observer = RolloutObserver(members.rollouts, config.security, settings.observe_seconds, trace)
    if settings.observe_seconds:
        parts.callback(observer.close)
        observer.start()
    evaluator = Evaluator(
        around.evaluation_sets,
        settings.evaluation,
        folder / "evaluations",
        session=session,
        control=control,
        status=status,
        journal=journal,
        reporter=reporter,
    )
    invalid = InvalidGroups(
        session, learner.check_group, partial(reporter.notice, "warning"), members.alive, settings.max_invalid_groups
    )
    sampling = DynamicSampling(settings, session)
    batches = BatchFetcher(session, invalid, sampling, on_arrival=control.attention.call_for)
    parts.callback(batches.close)
    parts.callback(closing.set)  # first of all: an update under way need not come to its end
    facts = TrainingFacts(
        run_id=config.run.id,
        folder=folder,
        first_step=learner.step,
        max_steps=run.spec.max_steps,
        settings=settings.model_dump(mode="json"),
    )
    callbacks = Callbacks(check_callbacks(settings.callbacks), facts)
    parts.callback(callbacks.close)
    loop = TrainingLoop(
        settings=settings,
        max_steps=run.spec.max_steps,
        folder=folder,
        learner=learner,
        session=session,
        batches=batches,
        handout=handout,
        observer=observer,
        checkpointer=checkpointer,
        evaluator=evaluator,
        journal=journal,
        reporter=reporter,
        control=control,
        status=status,
        traces=GroupTraces(config.run.id),
        patience=patience,
        callbacks=callbacks,
    )
    return loop.run().value


def _trace(settings: TrainerSection, folder: Path, status: Status, parts: contextlib.ExitStack) -> Trace | None:
    """The run's trace, fed with the trainer's phases; None if none is asked for."""
    if not settings.trace:
        return None
    trace = Trace(folder / "trace.json")
    parts.callback(trace.close)
    parts.callback(setattr, status, "on_phase", None)
    status.on_phase = partial(trace.span, "trainer")
    return trace


def _load(config: LoadedConfig[TrainerSection]) -> Learner:
    torch.set_num_threads(config.section.torch_threads)
    assert config.model.path is not None, "preflight checked it"
    return create_learner(config.section, config.model.path, config.run)
