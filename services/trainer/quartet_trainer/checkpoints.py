"""Checkpoint folders: written atomically, found, pruned, and locked against other trainers.

Imports no torch. `quartet_trainer.learner.storage` defines what a checkpoint contains.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quartet_common.checkpoints import MANIFEST, REPLACED_SUFFIX, WRITING_PREFIX, read_manifest
from quartet_common.ledger import sync
from quartet_common.log import get_logger
from quartet_trainer.disk_space import is_full
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)


@contextmanager
def atomic_folder(folder: Path, facts: dict[str, Any] | None = None) -> Iterator[Path]:
    """Yield a temporary folder to write into, which is renamed to `folder` at the end of the block.

    All files are synced to disk before the rename, and the rename before this returns. If the block raises, the
    temporary folder is removed. An existing `folder` is first moved aside, so that one of the two always exists.

    Args:
        folder: the final path.
        facts: JSON-serializable; written into `manifest.json` with the size of every file. None: no manifest.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.with_name(WRITING_PREFIX + folder.name)
    if writing.exists():
        shutil.rmtree(writing)  # left by a process that was killed while writing
    writing.mkdir()
    try:
        yield writing
        if facts is not None:
            sizes = {str(p.relative_to(writing)): p.stat().st_size for p in sorted(writing.rglob("*")) if p.is_file()}
            (writing / MANIFEST).write_text(json.dumps({**facts, "files": sizes}, indent=1), encoding="utf-8")
        _sync_tree(writing)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    _put_in_place(writing, folder)


def _put_in_place(writing: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + REPLACED_SUFFIX)
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)
    writing.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of optimizer steps: the policy version of its weights."""
    saved_at: float
    """When it was completed, in seconds since the Unix epoch."""
    manifest: dict[str, Any]


def checkpoint_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step` under `root`."""
    return root / f"step-{step:08d}"


def find_checkpoints(root: Path) -> list[CheckpointFolder]:
    """Return the complete checkpoints under `root`, in the order of their steps; none if `root` does not exist.

    A checkpoint is complete if it has a manifest and every file that the manifest names, with its size.
    """
    if not root.is_dir():
        return []
    found: dict[int, CheckpointFolder] = {}
    for path in sorted(root.iterdir(), reverse=True):  # "step-3" comes after "step-3.replaced" and overwrites it
        checkpoint = _complete(path)
        if checkpoint is not None:
            found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


def prune(root: Path, keep_last: int, keep: Container[int] = ()) -> list[CheckpointFolder]:
    """Remove all but the `keep_last` (>= 1) newest checkpoints and those of the steps in `keep`, and what killed
    writers left. Call it only while nothing is being written under `root`. Return the removed checkpoints."""
    if keep_last < 1:
        raise ValueError(f"keep_last: got {keep_last}, allowed: 1 or more")
    checkpoints = find_checkpoints(root)
    surplus = [checkpoint for checkpoint in checkpoints[:-keep_last] if checkpoint.step not in keep]
    kept = {checkpoint.path for checkpoint in checkpoints if checkpoint not in surplus}
    for path in root.iterdir() if root.is_dir() else ():
        left_over = path.name.startswith(WRITING_PREFIX) or path.name.endswith(REPLACED_SUFFIX)
        if left_over and path not in kept:
            shutil.rmtree(path)
    for checkpoint in surplus:
        if checkpoint.path.exists():
            # Renamed first: what is left if this process is killed meanwhile is removed the next time.
            removing = checkpoint.path.with_name(WRITING_PREFIX + checkpoint.path.name)
            checkpoint.path.rename(removing)
            shutil.rmtree(removing)
    return surplus


def _complete(path: Path) -> CheckpointFolder | None:
    manifest = read_manifest(path)
    if manifest is None or not isinstance(manifest.get("step"), int):
        return None
    try:
        saved_at = (path / MANIFEST).stat().st_mtime
    except FileNotFoundError:
        return None  # removed meanwhile
    return CheckpointFolder(path, manifest["step"], saved_at, manifest)


LOCK_FILE = ".lock"
LOCK_SECONDS = 10.0
"""Enough for a trainer that was just stopped or killed to end."""
RETRY_SECONDS = 0.2


@contextmanager
def locked_folder(root: Path, pause: Callable[[float], None]) -> Iterator[None]:
    """Lock a folder against other trainers (flock, released when the process ends). Create it if it does not exist.

    Wait up to `LOCK_SECONDS` for another trainer to end. `pause` sleeps between attempts, and may raise.

    Raises:
        TrainingError: another trainer has locked the folder, or it cannot be written.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (root / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(root, error) from error
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise TrainingError(
                    f"'{root}' is in use by another trainer ({file.read().strip() or 'unknown'}): stop that one, or "
                    "choose another trainer.checkpoint.folder"
                )
            pause(RETRY_SECONDS)
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n"
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), holder.encode())  # unbuffered: closing the file would write it once more
        except OSError as error:
            if not is_full(error):
                raise _cannot_write(root, error) from error
        yield


def _cannot_write(root: Path, error: OSError) -> TrainingError:
    return TrainingError(f"cannot write in the folder of checkpoints '{root}': {error}")


def _try_lock(file: TextIO) -> bool:
    """Return whether the lock was acquired; True with a warning if the file system does not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("the checkpoint folder cannot be locked; make sure that no other trainer uses it: %s", error)
    return True
