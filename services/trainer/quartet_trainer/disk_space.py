"""Full disks: the training waits for space to write what it needs, and keeps its state meanwhile."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quartet_common.log import get_logger
from quartet_server import metrics
from quartet_trainer.control import Control
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.status import Status

log = get_logger(__name__)

_WAITING = metrics.gauge(
    "quartet_trainer_waiting_for_disk_seconds",
    "How long the trainer has waited for space on a disk; 0: it does not.",
    ["run"],
)
RETRY_SECONDS = 2.0
_FULL = tuple(os.strerror(code).lower() for code in (errno.ENOSPC, errno.EDQUOT))
Written = TypeVar("Written")


def is_full(error: Exception) -> bool:
    """Whether space or quota was lacking, by the text: that is all that other ranks and libraries pass on."""
    return any(text in str(error).lower() for text in _FULL)


class DiskSpace:
    """Repeats what could not be written on a full disk. Call it from the loop's thread only."""

    def __init__(self, control: Control, status: Status, idle: Callable[[], None]):
        """`idle`: called now and then while it waits, as `Learner.idle`."""
        self._control, self._status, self._idle = control, status, idle
        self._waiting = _WAITING.labels(status.run_id)

    def until_written(self, folder: Path, write: Callable[[], Written], needed: int = 0) -> Written:
        """Return what `write` returns, once there is space; it is not called while fewer than `needed` bytes are free.

        Raises:
            Stopped: the trainer was asked to stop, and there is no space.
        """
        began = 0.0
        try:
            while True:
                free = shutil.disk_usage(folder).free
                try:
                    if free >= needed:
                        return write()
                except (OSError, LearnerError, TrainingError) as error:
                    if not is_full(error):
                        raise
                if not began:
                    began = time.monotonic()
                    log.warning(
                        f"the disk of '{folder}' is full: {needed or 'some'} bytes are needed, {free} are free; the "
                        "trainer keeps its state and waits for space"
                    )
                    self._status.wait_for(f"space on the disk of '{folder}'")
                self._waiting.set(time.monotonic() - began)
                self._idle()
                self._control.wait(RETRY_SECONDS)
        finally:
            if began:
                self._waiting.set(0)
                self._status.wait_for("")
