"""Folders and files that a service will write, and its shared memory, checked before it starts."""

import logging
import os
import shutil
from pathlib import Path

from quartet_common.config import ConfigError

log = logging.getLogger(__name__)  # quartet_common.log imports tracing, which imports this module

GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")


def check_folder(key: str, folder: Path) -> None:
    """Raise ConfigError if this process cannot create files in a folder, which is created with its parents."""
    existing = _nearest(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key}: '{folder}' cannot be written: '{existing}' is not a writable folder; name one of this user"
        )


def check_file(key: str, file: Path) -> None:
    """Raise ConfigError if this process cannot write a file, which is created with its folder."""
    if not os.path.exists(file):
        check_folder(key, file.parent)
    elif file.is_dir() or not os.access(file, os.W_OK):
        raise ConfigError(f"{key}: cannot write '{file}': {'it is a folder' if file.is_dir() else 'no permission'}")


def warn_of_open_secret(key: str, file: Path) -> None:
    """Warn if every user of this host may read a file that holds a secret."""
    if file.stat().st_mode & 0o004:
        log.warning("%s: '%s' can be read by every user of this host: chmod o-r", key, file)


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where a folder is or will be created."""
    return shutil.disk_usage(_nearest(folder)).free


def size_bytes(folder: Path) -> int:
    """Return the size of the disk where a folder is or will be created."""
    return shutil.disk_usage(_nearest(folder)).total


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists and can be seen."""
    return next(each for each in (path, *path.absolute().parents) if os.path.exists(each))


def warn_of_little_shared_memory() -> None:
    """Warn if /dev/shm, where engine processes and NCCL exchange tensors, is small: containers have 64 MiB."""
    total = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0
    if total < GIB:
        log.warning("/dev/shm holds %.2f GiB, too little for several processes or GPUs: --shm-size=8g", total / GIB)
