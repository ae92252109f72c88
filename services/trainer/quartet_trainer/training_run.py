"""Loads the learner, finds the run, assembles the loop and its parts, trains, and closes them.

Everything runs in the training thread. This module imports torch and is imported in that thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.channel import connect_sync
from quartet_common.config import ConfigError, LoadedConfig, split_address
from quartet_common.diagnosis import Peer
from quartet_common.ports import interface_address
from quartet_trainer import launch
from quartet_trainer.callbacks import Callbacks, TrainingFacts, check_callbacks
from quartet_trainer.checkpointer import Checkpointer, EarlyStopping
from quartet_trainer.checkpoints import locked_folder
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.data import BatchFetcher, InvalidGroups
from quartet_trainer.disk_space import DiskSpace
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.evaluation import Evaluator
from quartet_trainer.learner import create_learner
from quartet_trainer.learner.distributed import Announcements, shutdown
from quartet_trainer.loop import TrainingLoop
from quartet_trainer.members import Members, Reporter
from quartet_trainer.observation import RolloutObserver
from quartet_trainer.preflight import checkpoint_root, evaluation_sets
from quartet_trainer.records.flat import FlatRewards
from quartet_trainer.records.journal import Journal, writing
from quartet_trainer.records.traces import GroupTraces
from quartet_trainer.rendezvous import Rendezvous
from quartet_trainer.session import BrokerSession
from quartet_trainer.sleep import RolloutSleep
from quartet_trainer.status import Status
from quartet_trainer.weight_sync.publisher import Publisher
from quartet_trainer.weight_sync.rollouts import Rollouts
from quartet_trainer.weight_sync.transports import create_transport

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # imports ColossalAI, which is patched first


@dataclass(frozen=True)
class TrainerContext:
    """What the service passes to the training."""

    config: LoadedConfig[TrainerSection]
    instance_id: str
    me: Callable[[], broker_pb2.Member]
    """Returns this trainer's current Member."""
    control: Control
    status: Status
    ready: Callable[[], None]
    """Called, also several times, when the trainer waits for its run or has opened a session."""


def run_worker(config: LoadedConfig[TrainerSection], status: Status) -> None:
    """Run a rank above 0: load the model and follow rank 0 until the end of the training."""
    load_learner(config).follow(Announcements(), status)
    shutdown()


def train(context: TrainerContext) -> str:
    """Run rank 0: train until the run is over or the service is stopped. Return the reason, for the log.

    Raises:
        TrainingError, LearnerError, ConfigError: the training cannot start or continue.
        Stopped: the service was stopped while the training waited.
    """
    config, control, status = context.config, context.control, context.status
    channel = connect_sync(config.addresses.broker, config.security, service="broker")
    session = BrokerSession(
        channel,
        Peer("broker", config.addresses.broker, config.security),
        run_id=config.run.id,
        holder=context.instance_id,
        control=control,
        status=status,
        patience=config.section.broker_timeout_seconds,
    )
    learner = load_learner(config)
    with leading(learner), contextlib.closing(channel):
        status.enter(trainer_pb2.TRAINER_PHASE_WAITING_FOR_BROKER)

        def wait() -> None:
            context.ready()
            learner.idle()

        run = session.wait_for_run(while_waiting=wait)
        status.made_by = run.made_by
        status.enter(trainer_pb2.TRAINER_PHASE_STARTING)
        if run.state != broker_pb2.RUN_STATE_ACTIVE:
            context.ready()
            state = broker_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
            return f"run '{config.run.id}' has {state} already"
        return _train(context, session, learner, run)


@contextlib.contextmanager
def leading(learner: Learner) -> Iterator[None]:
    """Lead the other ranks in the block; end them, and the process groups, after it."""
    if launch.world_size() > 1:
        learner.announcements = Announcements()
    others_listen = True
    try:
        yield
    except Exception as error:
        # After another error, e.g. out of memory, they may wait for this rank in a collective until they are killed.
        others_listen = isinstance(error, TrainingError | LearnerError | ConfigError | Stopped)
        raise
    finally:
        if others_listen:
            with contextlib.suppress(TrainingError):  # a rank has ended already
                learner.stop()
        shutdown()


def _train(context: TrainerContext, session: BrokerSession, learner: Learner, run: broker_pb2.Run) -> str:
    """Create the loop's parts, train, and close them in reverse order."""
    config, settings, control, status = context.config, context.config.section, context.control, context.status
    folder, root = config.run.path, checkpoint_root(config)
    with contextlib.ExitStack() as parts:
        with writing(folder):  # 0700: prompts and completions may be confidential
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts.enter_context(locked_folder(root, control.wait))
        patience = EarlyStopping(settings.early_stop) if settings.early_stop.metric else None
        space = DiskSpace(control, status, idle=learner.idle)
        checkpointer = Checkpointer(
            root, settings.checkpoint, run, learner, session, status, space, patience, on_durable=control.wake.set
        )
        parts.callback(checkpointer.close)
        checkpointer.restore()
        checkpointer.open_session()
        status.session_epoch = session.epoch
        context.ready()
        journal = Journal(folder, first_step=learner.step, tensorboard=settings.tensorboard)
        parts.callback(journal.close)
        reporter = Reporter(session.stub, config.run.id, context.instance_id)
        parts.callback(reporter.close)
        heartbeat_seconds = run.spec.member_ttl.ToTimedelta().total_seconds() / 3
        members = Members(session.stub, config.run.id, context.me, heartbeat_seconds, on_change=control.wake.set)
        parts.callback(members.close)
        control.leave = members.close
        closing = threading.Event()
        rollouts = Rollouts(members, config.security, lambda: control.stopping.is_set() or closing.is_set())
        parts.callback(rollouts.close)
        publisher = _publisher(context, rollouts, learner)
        parts.callback(publisher.close)
        observer = RolloutObserver(members.rollouts, config.security)
        parts.callback(observer.close)
        warn = partial(reporter.notice, "warning")
        invalid = InvalidGroups(session, learner.check_group, warn, members.alive, settings.max_invalid_groups)
        batches = BatchFetcher(session, invalid, settings, on_arrival=control.wake.set)
        parts.callback(batches.close)
        parts.callback(closing.set)  # runs first, and makes the publisher give up the update under way
        evaluator = Evaluator(
            evaluation_sets(config),
            settings.evaluation,
            folder / "evaluations",
            session=session,
            control=control,
            status=status,
            journal=journal,
            reporter=reporter,
        )
        loop = TrainingLoop(
            settings=settings,
            max_steps=run.spec.max_steps,
            folder=folder,
            learner=learner,
            session=session,
            batches=batches,
            publisher=publisher,
            sleep=RolloutSleep(rollouts, settings.weights),
            observer=observer,
            checkpointer=checkpointer,
            evaluator=evaluator,
            journal=journal,
            reporter=reporter,
            control=control,
            status=status,
            traces=GroupTraces(config.run.id),
            flat=FlatRewards(settings.algorithm.compares_groups, learner.step),
            patience=patience,
            callbacks=start_callbacks(context, learner.step, run.spec.max_steps, parts),
        )
        return loop.run().value


def _publisher(context: TrainerContext, rollouts: Rollouts, learner: Learner) -> Publisher:
    config, weights = context.config, context.config.section.weights
    if weights.interface and not weights.store_host:
        store_host = interface_address("trainer.weights.interface", weights.interface)
    else:
        store_host = weights.store_host or split_address(config.addresses.trainer)[0]
    folder = weights.folder / config.run.id if weights.folder else config.run.path / "weights"
    transport = create_transport(weights, store_host, folder)
    specs, on_end = learner.weight_specs(), context.control.wake.set
    return Publisher(config.run.id, weights, transport, rollouts, specs, learner.lora, on_end)


def start_callbacks(context: TrainerContext, first_step: int, max_steps: int, parts: contextlib.ExitStack) -> Callbacks:
    """Start the callbacks of [trainer]; `parts` closes them."""
    settings = context.config.section
    facts = TrainingFacts(
        run_id=context.config.run.id,
        folder=context.config.run.path,
        first_step=first_step,
        max_steps=max_steps,
        settings=settings.model_dump(mode="json"),
    )
    callbacks = Callbacks(check_callbacks(settings.callbacks), facts)
    parts.callback(callbacks.close)
    return callbacks


def load_learner(config: LoadedConfig[TrainerSection]) -> Learner:
    """Meet the other ranks and load the model. All ranks call."""
    torch.set_num_threads(config.section.torch_threads)
    assert config.model.path is not None, "preflight checked it"
    _kept = Rendezvous(config.section)
    return create_learner(config.section, config.model.path, config.run)
