"""Control of a run's services: pause, resume, checkpoint and stop of its trainer, drain of a rollout."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import grpc
from quartet.v1 import broker_pb2, trainer_pb2

from quartet_client.connection import Connections
from quartet_client.errors import QuartetError
from quartet_client.from_proto import FromProto
from quartet_common.durations import to_duration
from quartet_common.errors import AWAY

_NO_STEP = 2**62  # after all steps


@dataclass(frozen=True, slots=True)
class Checkpoint(FromProto):
    """A durable checkpoint of the first `step` steps, in the folder `path` on the trainer's host."""

    step: int
    path: str
    saved_at: datetime


@dataclass(frozen=True, slots=True)
class Drained:
    """A rollout that has left `run_id` ("": it was in none): groups finished meanwhile, and prompts given back."""

    address: str
    run_id: str
    finished: int
    given_back: int


async def trainer_status(connections: Connections, run_id: str) -> trainer_pb2.TrainerServiceGetStatusResponse:
    """Return the status of the trainer. Raises QuartetError if it trains another run than `run_id` ("": any)."""
    trainer = connections.trainer
    status = await trainer.call(trainer.stub.GetStatus, trainer_pb2.TrainerServiceGetStatusRequest())
    if run_id not in ("", status.run_id):
        raise QuartetError(
            f"the trainer at {trainer.address} trains run '{status.run_id}', not '{run_id}'; set addresses.trainer to "
            f"the trainer of '{run_id}'",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    return status


async def pause(connections: Connections, run_id: str, reason: str, limit: float, timeout: float) -> int:
    """Pause, and return the steps done when the step in progress is."""
    trainer = connections.trainer
    async with deadline(f"the end of the step in progress at the trainer at {trainer.address}", timeout):
        status = await trainer_status(connections, run_id)
        request = trainer_pb2.PauseRequest(reason=reason, limit=to_duration(limit))
        paused = await trainer.call(trainer.stub.Pause, request)
        if status.step < paused.step:
            await _watch(connections, paused.step - 2)
        return paused.step


async def stop(connections: Connections, run_id: str, reason: str, timeout: float) -> int:
    """Stop the trainer, wait until it has ended, and return how many steps are committed then."""
    trainer, broker = connections.trainer, connections.broker
    async with deadline(f"the end of the trainer at {trainer.address}", timeout):
        run_id = (await trainer_status(connections, run_id)).run_id
        await trainer.call(trainer.stub.Stop, trainer_pb2.StopRequest(reason=reason))
        try:
            await _watch(connections, _NO_STEP)
        except QuartetError as error:
            if error.code not in AWAY:
                raise
    return (await broker.call(broker.stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id))).run.committed_step


async def _watch(connections: Connections, after_step: int) -> None:
    """Wait until a step after `after_step` has been reported, or the training has ended."""
    trainer = connections.trainer
    async with trainer.errors():
        call = trainer.stub.WatchMetrics(trainer_pb2.WatchMetricsRequest(after_step=after_step))
        try:
            async for _ in call:
                return
        finally:
            call.cancel()


@asynccontextmanager
async def deadline(what: str, timeout: float) -> AsyncIterator[None]:
    """Bound what is done inside, and a service that hangs, by `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        raise QuartetError(
            f"{what} did not come within {timeout:g} s; it was asked for, and quartet status says what happens",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ) from None


@asynccontextmanager
async def held(connections: Connections, limit: float) -> AsyncIterator[int]:
    """Pause training for at most `limit` seconds; yield its policy version. Resume unless it was paused before."""
    trainer = connections.trainer
    status = await trainer_status(connections, "")
    request = trainer_pb2.PauseRequest(reason="an evaluation", limit=to_duration(limit + connections.timeout))

    async def resume() -> None:
        if status.phase != trainer_pb2.TRAINER_PHASE_PAUSED:
            await trainer.call(trainer.stub.Resume, trainer_pb2.ResumeRequest())

    try:
        paused = await trainer.call(trainer.stub.Pause, request)
    except BaseException:  # cancelled, or a lost answer: the trainer may have paused
        with suppress(QuartetError):
            await resume()
        raise
    try:
        yield paused.step
    finally:
        await resume()
