"""Full disks: what must be written is written when there is space; the training waits for it and keeps its state."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quartet_common import metrics
from quartet_common.log import get_logger
from quartet_trainer.control import Control
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.status import Status

log = get_logger(__name__)

_WAITING = metrics.gauge(
    "quartet_trainer_waiting_for_disk_seconds", "How long the trainer has waited for space on a disk; 0: it does not."
)
RETRY_SECONDS = 2.0
_FULL = tuple(os.strerror(code).lower() for code in (errno.ENOSPC, errno.EDQUOT))

Written = TypeVar("Written")


def is_full(error: Exception) -> bool:
    """Whether something was not written for want of space or quota. It reads the text: that is all that other ranks and
    libraries pass on."""
    return any(text in str(error).lower() for text in _FULL)


class DiskSpace:
    """Repeats what could not be written on a full disk. Call it from the loop's thread only."""

    def __init__(self, control: Control, status: Status, idle: Callable[[], None]):
        """`idle`: called now and then while it waits, as `Learner.idle`."""
        self._control, self._status, self._idle = control, status, idle

    def until_written(self, folder: Path, write: Callable[[], Written], needed: int = 0) -> Written:
        """Return what `write` returns, once it is not refused for want of space.

        Args:
            folder: an existing one on the disk.
            needed: bytes; `write` is not called while fewer are free.

        Raises:
            Stopped: the trainer was asked to stop, and there is no space.
        """
        began = 0.0
        try:
            while True:
                free = shutil.disk_usage(folder).free
                if free >= needed:
                    try:
                        return write()
                    except (OSError, LearnerError, TrainingError) as error:
                        if not is_full(error):
                            raise
                if not began:
                    began = time.monotonic()
                    log.warning(
                        "the disk of '%s' is full: %s bytes are needed, %s are free; the trainer keeps its state and "
                        "waits for space",
                        *(folder, f"{needed:,}" if needed else "some", f"{free:,}"),
                    )
                    self._status.wait_for(f"space on the disk of '{folder}'")
                _WAITING.set(time.monotonic() - began)
                self._idle()
                self._control.wait(RETRY_SECONDS)
        finally:
            if began:
                _WAITING.set(0)
                self._status.wait_for("")
                log.info("the wait for space on the disk ends", extra={"seconds": round(time.monotonic() - began, 1)})
