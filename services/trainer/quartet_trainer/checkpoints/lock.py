"""One trainer at a time in a folder of checkpoints: two would prune and replace each other's."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from quartet_common.log import get_logger

log = get_logger(__name__)

LOCK_FILE = ".lock"
RETRY_SECONDS = 0.2


class FolderInUse(Exception):
    """Another trainer has the folder; the text says which."""


class FolderLock:
    """A lock that ends with the process that holds it, however that ends (flock)."""

    def __init__(self, root: Path):
        """`root`: the folder; it need not exist yet."""
        self._root = root
        self._file: TextIO | None = None

    def acquire(self, seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
        """Take the lock, waiting at most `seconds` for a trainer that is just ending.

        Args:
            seconds: patience.
            pause: waits between two attempts; it may raise.

        Raises:
            FolderInUse: another process has it.
            OSError: the folder cannot be written.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (self._root / LOCK_FILE).open("a+", encoding="utf-8")
        deadline = time.monotonic() + seconds
        try:
            while not _try_lock(file):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise FolderInUse(
                        f"'{self._root}' is in use by another trainer ({file.read().strip() or 'unknown'})"
                    )
                pause(RETRY_SECONDS)
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def release(self) -> None:
        """Let others have it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _try_lock(file: TextIO) -> bool:
    """Whether it could be had. Where the file system knows no locks there is nothing to wait for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("the folder of checkpoints cannot be locked; see that no second trainer uses it: %s", error)
    return True
