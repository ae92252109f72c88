"""TrainerService: status, metrics, checkpoints, and pausing or stopping the training."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

from quartet.v1 import trainer_pb2, trainer_pb2_grpc

from quartet_common.durations import to_seconds
from quartet_common.errors import failed_precondition, invalid_argument
from quartet_common.identity import check_owner
from quartet_common.log import get_logger
from quartet_common.text import encodable
from quartet_trainer.checkpointer import as_message
from quartet_trainer.checkpoints import find_checkpoints
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control, Stopped
from quartet_trainer.status import Status

log = get_logger(__name__)

LONGEST_PAUSE_SECONDS = 30 * 86400.0
_LONGEST_REASON = 1000


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Reads `Status` and passes requests to the training thread through `Control`."""

    def __init__(
        self,
        settings: TrainerSection,
        world_size: int,
        checkpoints: Path,
        status: Status,
        control: Control,
        stop: Callable[[str], None],
    ):
        """`checkpoints`: the checkpoints' folder. `stop`: stops the service; its argument is the reason."""
        self._settings = settings
        self._world_size = world_size
        self._checkpoints = checkpoints
        self._status = status
        self._control = control
        self._stop = stop

    async def GetStatus(self, request, context):  # noqa: N802 (the contract's name, as below)
        status = self._status
        return trainer_pb2.TrainerServiceGetStatusResponse(
            run_id=status.run_id,
            phase=status.phase,
            step=status.step,
            checkpoint_step=status.checkpoint_step,
            published_version=status.published_version,
            algorithm=self._settings.algorithm.name,
            plugin=self._settings.plugin,
            world_size=self._world_size,
            warning=status.warning,
            phase_seconds=status.phase_seconds(),
            waiting_for=status.waits,
            group_epoch=status.group_epoch,
            session_epoch=status.session_epoch,
        )

    async def WatchMetrics(self, request, context):  # noqa: N802
        if request.after_step < -1:
            raise invalid_argument("after_step", request.after_step, "a step from 0, or -1 for all")
        async for report in self._status.watch(request.after_step):
            yield report

    async def SaveCheckpoint(self, request, context):  # noqa: N802
        self._check_owner()
        if not self._status.step:
            raise failed_precondition("checkpoint", "no batch has been trained yet: there is nothing to save")
        if self._status.phase == trainer_pb2.TRAINER_PHASE_FINISHED:
            raise failed_precondition("checkpoint", "the training has ended; ListCheckpoints lists its checkpoints")
        try:
            checkpoint = await asyncio.wrap_future(self._control.request_checkpoint())
        except Stopped as error:
            raise failed_precondition("checkpoint", str(error)) from error
        return trainer_pb2.SaveCheckpointResponse(checkpoint=checkpoint)

    async def ListCheckpoints(self, request, context):  # noqa: N802
        found = await asyncio.to_thread(find_checkpoints, self._checkpoints)
        return trainer_pb2.ListCheckpointsResponse(checkpoints=[as_message(folder) for folder in found])

    async def Stop(self, request, context):  # noqa: N802
        self._check_owner()
        training = self._status.phase == trainer_pb2.TRAINER_PHASE_TRAINING
        step = self._status.step + (1 if training else 0)
        self._stop(f"asked to by Stop: {_shown(request.reason)}")
        return trainer_pb2.StopResponse(step=step)

    async def Pause(self, request, context):  # noqa: N802
        self._check_owner()
        self._refuse_when_finished("pause")
        limit = to_seconds(request.limit)
        if not 0 <= limit <= LONGEST_PAUSE_SECONDS:
            raise invalid_argument("limit", f"{limit:g} s", f"0 to {LONGEST_PAUSE_SECONDS:g} s, or unset")
        log.info("paused: %s", _shown(request.reason))
        return trainer_pb2.PauseResponse(step=max(self._control.pause(limit or math.inf), self._status.step))

    async def Resume(self, request, context):  # noqa: N802
        self._check_owner()
        self._refuse_when_finished("resume")
        self._control.resume()
        return trainer_pb2.ResumeResponse(step=self._status.step)

    def _check_owner(self) -> None:
        check_owner(f"run '{self._status.run_id}'", self._status.made_by)

    def _refuse_when_finished(self, what: str) -> None:
        if self._status.phase == trainer_pb2.TRAINER_PHASE_FINISHED:
            raise failed_precondition(what, "the training has ended")


def _shown(reason: str) -> str:
    return encodable(reason, _LONGEST_REASON) or "no reason given"
