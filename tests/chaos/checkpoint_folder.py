"""The stand-in trainer's disk: checkpoints and the ledger beside them, laid out as the trainer's, for `quartet audit`.

Each trainer has a folder of its own. The one that takes over fetches the newest checkpoint from the other's, if that is
newer than its own: a trainer that was replaced, but wakes up in the middle of a write, then writes where nobody trains.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import content

from quartet_common.ledger import LEDGER_FILE, Ledger, Mark

KEPT = 2
_WRITING = ".writing-"


@dataclass
class State:
    """What is trained: the weights, and what a later life needs to go on from them."""

    step: int = 0
    weights: str = content.NO_WEIGHTS
    mark: Mark | None = None
    """Of the ledger, when it was restored."""
    first_remembered_pass: int = 0


class CheckpointFolder:
    """One trainer's folder."""

    def __init__(self, folder: Path, run_id: str, created_at: str):
        self.folder = folder
        self.ledger = Ledger(folder / LEDGER_FILE)
        self._identity = {"run_id": run_id, "run_created_at": created_at}

    def restore(self, others: list[Path]) -> State:
        """Go back to the newest complete checkpoint of this folder or the others, and the ledger with it.

        Raises:
            OSError, LedgerError: another trainer changed its folder meanwhile: ask again.
        """
        found = [checkpoint for folder in (*others, self.folder) for checkpoint in manifests(folder)]
        if not found:
            self.ledger.rewind(None)
            return State()
        newest = max(found, key=lambda each: (each["step"], each["path"].parent == self.folder))
        path = self.folder / newest["path"].name
        if newest["path"] != path:
            self.ledger.close()
            shutil.copy(newest["path"].parent / LEDGER_FILE, self.folder / f"{_WRITING}ledger")
            os.replace(self.folder / f"{_WRITING}ledger", self.folder / LEDGER_FILE)
        self.ledger.rewind(newest["ledger"])
        if newest["path"] != path:
            writing = _fresh(path)
            shutil.copytree(newest["path"], writing)
            if not _whole(writing, newest):
                raise OSError(f"{newest['path']} was removed while it was copied")
            _put_in_place(writing, path)
        weights = (path / "weights.txt").read_text()
        return State(newest["step"], weights, newest["ledger"], newest["first_remembered_pass"])

    def save(self, state: State, at: Callable[[str], None]) -> None:
        """Write a checkpoint: whole or not at all. `at` is told where the writing is, and may be the end of it."""
        mark = self.ledger.mark()
        folder = self.folder / f"step-{state.step:08d}"
        writing = _fresh(folder)
        writing.mkdir(parents=True)
        (writing / "weights.txt").write_text(state.weights)
        at("checkpoint-half")
        files = {"weights.txt": len(state.weights)}
        passes = {"first_remembered_pass": state.first_remembered_pass}
        manifest = {"step": state.step, **self._identity, **passes, "ledger": mark, "files": files}
        (writing / "manifest.json").write_text(json.dumps(manifest))
        at("checkpoint-written")
        _put_in_place(writing, folder)
        at("checkpoint-durable")
        for found in manifests(self.folder)[:-KEPT]:
            shutil.rmtree(found["path"])


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of the complete checkpoints in a folder, oldest first, each with its "path"."""
    found = []
    for path in folder.glob("step-*"):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except FileNotFoundError:
            continue  # its owner is removing it, or was killed while it did
        if _whole(path, manifest):
            found.append({**manifest, "path": path})
    return sorted(found, key=lambda manifest: manifest["step"])


def _whole(path: Path, manifest: dict[str, Any]) -> bool:
    sizes = manifest["files"].items()
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in sizes)


def _fresh(folder: Path) -> Path:
    """Where a checkpoint is written before it is put in its place."""
    writing = folder.with_name(_WRITING + folder.name)
    shutil.rmtree(writing, ignore_errors=True)  # left by a life that was killed while it wrote
    return writing


def _put_in_place(writing: Path, folder: Path) -> None:
    for path in [*writing.iterdir(), writing]:
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    writing.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
