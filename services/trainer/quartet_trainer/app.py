"""The trainer service: creates, starts and stops its parts."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from quartet.v1 import broker_pb2, common_pb2, trainer_pb2, trainer_pb2_grpc

from quartet_common.config import ConfigError
from quartet_common.log import get_logger
from quartet_server.host import ServiceHost
from quartet_server.vitals import report_disk
from quartet_trainer import launch
from quartet_trainer.control import Control, Stopped
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.learner.checks import ModelFolderError
from quartet_trainer.preflight import Config, checkpoint_root
from quartet_trainer.servicer import TrainerServicer
from quartet_trainer.sft_data import sft_config
from quartet_trainer.stall import StallWatch
from quartet_trainer.status import Status

log = get_logger(__name__)

WORKER_GRACE_SECONDS = 5.0


async def serve_sft(config: Config, host: ServiceHost) -> None:
    """As `serve`, for supervised fine-tuning."""
    await serve(sft_config(config), host, sft=True)


async def serve(config: Config, host: ServiceHost, *, sft: bool = False) -> None:
    """Serve TrainerService and train, until the run is over or the service is stopped."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.section.torch_threads))
    # OpenMP threads sleep while idle; spinning, they would take CPU time from the other services.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # What fails is raised, too.
    status = Status(config.run.id)

    def on_stall(why: str) -> None:
        log.error("the trainer has stalled: %s", why)
        if launch.rank() > 0:
            launch.leave_process(1)
        host.stop("the trainer has stalled", exit_code=1)
        host.exit_code = 1  # also if it was stopping

    watch = StallWatch(launch.rank(), status, config.section.stall_seconds, on_stall)
    watching = host.spawn(watch.run(), "stall watch")
    if launch.rank() > 0:
        launch.ignore_signals()
        try:
            await _in_thread("training", lambda: _import_training(sft).run_worker(config, status))
        except (TrainingError, LearnerError) as error:
            log.error(str(error))
            host.exit_code = 1
        return
    workers, control = launch.WorkerProcesses(config.section.ranks), Control()
    status.on_waiting = _show_waiting(host, asyncio.get_running_loop())
    host.capabilities.extend([f"plugin.{config.section.plugin}", f"weights.{config.section.weights.transport}"])
    host.libraries.update({name: version(name) for name in ("torch", "colossalai", "transformers")})
    servicer = TrainerServicer(config.section, launch.world_size(), checkpoint_root(config), status, control, host.stop)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, host.server)
    host.loading = "model loading"
    for folder in {config.run.path, checkpoint_root(config)}:
        report_disk(folder)
    training = host.spawn(_train(config, host, control, status, sft), "training")
    host.spawn(_watch(workers, host), "ranks")

    async def drain() -> None:
        control.stop()
        begun = status.session_epoch >= 0
        if begun:  # otherwise there is nothing to save, and loading a model cannot be interrupted
            await asyncio.wait([training, watching], return_when=asyncio.FIRST_COMPLETED)
        stalled = begun and not training.done()
        training.cancel()
        await workers.end(grace=WORKER_GRACE_SECONDS if begun and not stalled else 0.0)
        if stalled:
            await asyncio.to_thread(control.leave)

    host.on_drain(drain)
    await host.run()


async def _train(config: Config, host: ServiceHost, control: Control, status: Status, sft: bool) -> None:
    """Run the training in a thread, and stop the service when it ends."""
    loop = asyncio.get_running_loop()

    def ready() -> None:
        if host.loading:
            asyncio.run_coroutine_threadsafe(host.set_ready(), loop)

    def live() -> str:
        training = _import_training(sft)
        return training.train(
            training.TrainerContext(
                config=config,
                instance_id=host.instance_id,
                me=lambda: _member(host, status),
                control=control,
                status=status,
                ready=ready,
            )
        )

    try:
        ending = await _in_thread("training", live)
    except (ConfigError, ModelFolderError) as error:
        log.error(str(error))
        host.stop("the configuration cannot be used", exit_code=2)
    except (TrainingError, LearnerError) as error:
        log.error(str(error))
        host.stop("the training cannot go on", exit_code=1)
    except Stopped:
        host.stop("stopped before the training began, or what it waited for came")
    else:
        host.stop(ending)
    finally:
        status.enter(trainer_pb2.TRAINER_PHASE_FINISHED)
        control.close()
        status.close()


async def _watch(workers: launch.WorkerProcesses, host: ServiceHost) -> None:
    """Stop the service when a rank is lost."""
    try:
        await workers.watch()
    except TrainingError as error:
        if not host.stopping.is_set():  # otherwise it was killed
            log.error(str(error))
        host.stop("the training cannot go on", exit_code=1)


def _import_training(sft: bool):
    """Import torch and what needs it. This takes seconds; in the training thread it does not block the server."""
    from quartet_trainer import sft as fine_tuning
    from quartet_trainer import training_run
    from quartet_trainer.learner import colossalai_patches

    colossalai_patches.apply()
    gc.freeze()  # without a search for garbage, of which imports leave 2 %: `set_ready` looks through the rest
    gc.enable()
    return fine_tuning if sft else training_run


def _member(host: ServiceHost, status: Status) -> broker_pb2.Member:
    """Return this trainer's current Member."""
    seconds = status.phase_seconds()
    total = sum(seconds.values())
    idle = seconds.get("waiting_for_batch", 0.0) + seconds.get("publishing", 0.0)
    return broker_pb2.Member(
        instance_id=host.instance_id,
        kind=common_pb2.SERVICE_KIND_TRAINER,
        address=host.address,
        capabilities=host.capabilities,
        state=broker_pb2.MEMBER_STATE_ACTIVE,
        policy_version=status.step,
        gauges={"idle_fraction": idle / total if total else 0.0},
        waiting_for=status.waiting_for,
    )


def _show_waiting(host: ServiceHost, loop: asyncio.AbstractEventLoop) -> Callable[[str, str], None]:
    """Return a callback that puts what the training waits for into the handshake's answer."""

    def change(before: str, now: str) -> None:
        if before:
            loop.call_soon_threadsafe(host.waiting.discard, before)
        if now:
            loop.call_soon_threadsafe(host.waiting.add, now)

    return change


async def _in_thread(name: str, work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread, which does not keep the process alive, and return or raise its outcome."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.cancelled():
            set_it(value)

    def run() -> None:
        try:
            outcome = (done.set_result, work())
        except BaseException as error:  # raised again by the `await`
            outcome = (done.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
