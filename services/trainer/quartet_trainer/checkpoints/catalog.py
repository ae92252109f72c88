"""Which checkpoints there are, and which may go."""

from __future__ import annotations

import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from quartet_common.checkpoints import MANIFEST, REPLACED_SUFFIX, WRITING_PREFIX, read_manifest


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint."""

    path: Path
    step: int
    """Optimizer steps in it: the policy version of its weights."""
    saved_at: float
    """When it became complete, in seconds since the epoch, by this machine's clock."""


def checkpoint_folder(root: Path, step: int) -> Path:
    """The folder that the checkpoint of `step` is written to, under `root`."""
    return root / f"step-{step:08d}"


def find_checkpoints(root: Path) -> list[CheckpointFolder]:
    """The complete checkpoints under `root`, oldest step first; none if there is no such folder.

    A folder counts by its manifest, which is written last: every file that it names must be there with its size.
    """
    if not root.is_dir():
        return []
    found: dict[int, CheckpointFolder] = {}
    for path in sorted(root.iterdir(), reverse=True):  # so that "step-3" wins over "step-3.replaced"
        checkpoint = _complete(path)
        if checkpoint is not None:
            found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


def prune(root: Path, keep_last: int, keep: Container[int] = ()) -> list[CheckpointFolder]:
    """Remove all but the `keep_last` (>= 1) newest checkpoints, and what killed writers left. Returns what it removed.

    `keep`: steps whose checkpoints stay however old they are.

    Call it only while nothing is being written under `root`.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last: got {keep_last}, allowed: 1 or more")
    checkpoints = find_checkpoints(root)
    surplus = [checkpoint for checkpoint in checkpoints[:-keep_last] if checkpoint.step not in keep]
    for checkpoint in surplus:
        shutil.rmtree(checkpoint.path)
    kept = {checkpoint.path for checkpoint in checkpoints if checkpoint not in surplus}
    for path in root.iterdir() if root.is_dir() else ():
        left_over = path.name.startswith(WRITING_PREFIX) or path.name.endswith(REPLACED_SUFFIX)
        if left_over and path not in kept:
            shutil.rmtree(path)
    return surplus


def _complete(path: Path) -> CheckpointFolder | None:
    manifest = read_manifest(path)
    if manifest is None or not isinstance(manifest.get("step"), int):
        return None
    return CheckpointFolder(path=path, step=manifest["step"], saved_at=(path / MANIFEST).stat().st_mtime)
