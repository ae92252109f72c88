"""One training: the learner is loaded, the run found, the loop and its parts are put together and taken down.

All of it happens in the training thread; this module imports torch and is itself imported there.
"""

import base64
import contextlib
import random
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet.v1 import broker_pb2, trainer_pb2

from quartet_common.channel import connect_sync
from quartet_common.config import LoadedConfig, split_address
from quartet_common.diagnosis import Peer
from quartet_trainer import launch
from quartet_trainer.callbacks import Callbacks, TrainingFacts, check_callbacks
from quartet_trainer.checkpointer import Checkpointer, EarlyStopping
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.data import BatchFetcher, DynamicSampling, InvalidGroups
from quartet_trainer.distribute import Announcements, DistributedLearner, worker_loop
from quartet_trainer.errors import TrainingError
from quartet_trainer.evaluation import Evaluator
from quartet_trainer.learner import Learner, create_learner
from quartet_trainer.learner.distributed import shutdown
from quartet_trainer.loop import TrainingLoop
from quartet_trainer.members import Members, Reporter
from quartet_trainer.observation import RolloutObserver
from quartet_trainer.records.journal import Journal, writing
from quartet_trainer.records.traces import GroupTraces, Trace
from quartet_trainer.session import BrokerSession
from quartet_trainer.status import Status
from quartet_trainer.weight_sync import Publisher
from quartet_trainer.weight_sync.process_group import WeightStore, interface_address
from quartet_trainer.weight_sync.sync import WeightSync


@dataclass(frozen=True)
class TrainerContext:
    """What the service gives to the training."""

    config: LoadedConfig[TrainerSection]
    checkpoint_root: Path
    evaluation_sets: list[str]
    instance_id: str
    me: Callable[[], broker_pb2.Member]
    """This trainer as a member, as it is now."""
    control: Control
    status: Status


def run_worker(config: LoadedConfig[TrainerSection]) -> None:
    """Be a rank above 0, from loading the model to the end of the training."""
    worker_loop(_load(config), Announcements())
    shutdown()


def train(context: TrainerContext) -> str:
    """Be rank 0: train until the run is over or the service is stopped. Returns why it ended, in words.

    Raises:
        TrainingError, LearnerError, ConfigError: one sentence for a person.
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
    learner = DistributedLearner(_load(config), Announcements() if launch.world_size() > 1 else None)
    try:
        status.enter(trainer_pb2.TRAINER_PHASE_WAITING_FOR_BROKER)
        run = session.wait_for_run(while_waiting=learner.idle)
        status.made_by = run.made_by
        status.enter(trainer_pb2.TRAINER_PHASE_STARTING)
        if run.state != broker_pb2.RUN_STATE_ACTIVE:
            state = broker_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
            return f"run '{config.run.id}' has {state} already"
        return _train(context, session, learner, run)
    except Stopped:
        return "stopped before the training began"
    finally:
        with contextlib.suppress(TrainingError):  # ranks that are gone need not be told
            learner.stop()
        shutdown()
        channel.close()


def _train(context: TrainerContext, session: BrokerSession, learner: DistributedLearner, run: broker_pb2.Run) -> str:
    settings, control, status = context.config.section, context.control, context.status
    checkpointer = Checkpointer(
        context.checkpoint_root,
        settings.checkpoint,
        run,
        learner,
        session,
        status,
        on_durable=control.wake.set,
    )
    with contextlib.ExitStack() as parts:
        parts.callback(checkpointer.close)
        folder = context.config.run.path
        with writing(folder):  # prompts and completions are for its user alone
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        checkpointer.lock(control.wait)
        checkpointer.restore()
        patience = _patience(settings, checkpointer)
        if "random" in checkpointer.restored:
            restore_random_state(checkpointer.restored["random"])
        checkpointer.extra["random"] = random_state
        checkpointer.open_session()
        status.session_epoch = session.epoch
        return _run_loop(context, session, learner, run, checkpointer, patience, parts)


def _patience(settings: TrainerSection, checkpointer: Checkpointer) -> EarlyStopping | None:
    """Early stopping as it stands in the checkpoint; None if the run is not ended early."""
    if not settings.early_stop.metric:
        return None
    patience = EarlyStopping(settings.early_stop.mode, settings.early_stop.patience, settings.early_stop.min_delta)
    if "early_stop" in checkpointer.restored:
        patience.restore(checkpointer.restored["early_stop"])
    checkpointer.extra["early_stop"] = patience.to_json
    return patience


def _run_loop(
    context: TrainerContext,
    session: BrokerSession,
    learner: DistributedLearner,
    run: broker_pb2.Run,
    checkpointer: Checkpointer,
    patience: EarlyStopping | None,
    parts: contextlib.ExitStack,
) -> str:
    """Put the parts together, each closed again by `parts` in reverse order, and train."""
    config, settings, control, status = context.config, context.config.section, context.control, context.status
    folder = config.run.path
    closing = threading.Event()
    journal = Journal(folder, first_step=learner.step, tensorboard=settings.tensorboard)
    parts.callback(journal.close)
    reporter = Reporter(session.stub, config.run.id, context.instance_id)
    parts.callback(reporter.close)
    heartbeat_seconds = run.spec.member_ttl.ToTimedelta().total_seconds() / 3
    members = Members(session.stub, config.run.id, context.me, heartbeat_seconds, on_change=control.wake.set)
    parts.callback(members.close)
    publisher = _publisher(context, members, learner, stopping=lambda: control.stopping.is_set() or closing.is_set())
    trace = _trace(settings, folder, status, parts)
    weight_sync = WeightSync(
        publisher,
        learner,
        settings.weights.overlap,
        settings.weights.sleep_rollouts,
        on_end=control.wake.set,
        on_sent=partial(trace.span, "weights") if trace else None,
    )
    parts.callback(weight_sync.close)
    observer = RolloutObserver(members.rollouts, config.security, settings.observe_seconds, trace)
    parts.callback(observer.close)
    invalid = InvalidGroups(
        session, learner.check_group, partial(reporter.notice, "warning"), members.alive, settings.max_invalid_groups
    )
    batches = BatchFetcher(session, invalid, DynamicSampling(settings, session), on_arrival=control.wake.set)
    parts.callback(batches.close)
    parts.callback(closing.set)  # first of all: an update under way need not come to its end
    loop = TrainingLoop(
        settings=settings,
        max_steps=run.spec.max_steps,
        folder=folder,
        learner=learner,
        session=session,
        batches=batches,
        weight_sync=weight_sync,
        observer=observer,
        checkpointer=checkpointer,
        evaluator=_evaluator(context, session, journal, reporter),
        journal=journal,
        reporter=reporter,
        control=control,
        status=status,
        traces=GroupTraces(config.run.id),
        patience=patience,
        callbacks=_callbacks(context, learner.step, run.spec.max_steps, parts),
    )
    return loop.run().value


def _publisher(
    context: TrainerContext,
    members: Members,
    learner: DistributedLearner,
    stopping: Callable[[], bool],
) -> Publisher:
    config, weights = context.config, context.config.section.weights
    if weights.interface and not weights.store_host:
        store_host = interface_address(weights.interface)
    else:
        store_host = weights.store_host or split_address(config.addresses.trainer)[0]
    return Publisher(
        config.run.id,
        weights,
        WeightStore(store_host, weights.store_port),
        members,
        config.security,
        specs=learner.weight_specs(),
        stopping=stopping,
        folder=config.run.path / "weights",
        lora=learner.lora,
    )


def _evaluator(context: TrainerContext, session: BrokerSession, journal: Journal, reporter: Reporter) -> Evaluator:
    return Evaluator(
        context.evaluation_sets,
        context.config.section.evaluation,
        context.config.run.path / "evaluations",
        session=session,
        control=context.control,
        status=context.status,
        journal=journal,
        reporter=reporter,
    )


def _callbacks(context: TrainerContext, first_step: int, max_steps: int, parts: contextlib.ExitStack) -> Callbacks:
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


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's global generators, as JSON can hold it.

    Training itself draws nothing: there is no dropout, and batches come from the broker. Callbacks and plug-ins may.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, _text(array("Q", words).tobytes()), gauss],
        "numpy": [str(name), _text(np.asarray(keys, np.uint32).tobytes()), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_text(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()],
    }


def restore_random_state(saved: dict[str, Any]) -> None:
    """Go back to what `random_state` returned. CUDA's is restored for as many devices as there are now."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(array("Q", _bytes(words))), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.frombuffer(_bytes(keys), np.uint32), *rest))
    torch.set_rng_state(_tensor(saved["torch"]))
    for device, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(state), device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
