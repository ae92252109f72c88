"""Control of a run's services: pause, checkpoint and stop of its trainer, drain of a rollout."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import grpc
from quartet.v1 import trainer_pb2

from quartet_client.connection import Connections
from quartet_client.errors import QuartetError
from quartet_client.from_proto import FromProto
from quartet_common.durations import to_duration


@dataclass(frozen=True, slots=True)
class Checkpoint(FromProto):
    """A durable checkpoint of the first `step` steps, in the folder `path` on the trainer's host."""

    step: int
    path: str
    saved_at: datetime


@dataclass(frozen=True, slots=True)
class Drained(FromProto):
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
        there = f"the trainer at {trainer.address} trains run '{status.run_id}', not '{run_id}'"
        text = f"{there}; set addresses.trainer to the trainer of '{run_id}'"
        raise QuartetError(text, grpc.StatusCode.FAILED_PRECONDITION)
    return status


async def until_reported(connections: Connections, after_step: int = 2**62) -> None:
    """Wait until the trainer has reported a step after `after_step`, or has ended."""
    trainer = connections.trainer
    call = trainer.stub.WatchMetrics(trainer_pb2.WatchMetricsRequest(after_step=after_step))
    with suppress(StopAsyncIteration, QuartetError):
        async with trainer.errors():
            await anext(aiter(call))
    call.cancel()


@asynccontextmanager
async def deadline(what: str, timeout: float) -> AsyncIterator[None]:
    """Bound what is done inside, at a service that may hang, by `timeout` seconds. Raises QuartetError."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        text = f"{what} did not come within {timeout:g} s, but was asked for; see quartet status"
        raise QuartetError(text, grpc.StatusCode.DEADLINE_EXCEEDED) from None


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
