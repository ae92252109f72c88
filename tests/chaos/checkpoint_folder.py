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

import content

from quartet_common.checkpoints import MANIFEST, WRITING_PREFIX, newest_checkpoint, read_manifest
from quartet_common.ledger import LEDGER_FILE, Ledger, Mark

KEPT = 2


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
        found = [newest for folder in (self.folder, *others) if (newest := newest_checkpoint(folder))]
        if not found:
            self.ledger.rewind(None)
            return State()
        path, manifest = max(found, key=lambda each: each[1]["step"])  # of two alike its own
        own = self.folder / path.name
        if path != own:
            self.ledger.close()
            copy = self.folder / f"{WRITING_PREFIX}{LEDGER_FILE}"
            shutil.copy(path.parent / LEDGER_FILE, copy)
            os.replace(copy, self.folder / LEDGER_FILE)
        self.ledger.rewind(manifest["ledger"])
        if path != own:
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(path, own)
            if read_manifest(own) is None:
                raise OSError(f"{path} was removed while it was copied")
        weights = (own / "weights.txt").read_text()
        return State(manifest["step"], weights, manifest["ledger"], manifest["first_remembered_pass"])

    def save(self, state: State, at: Callable[[str], None]) -> None:
        """Write a checkpoint: whole or not at all. `at` is told where the writing is, and may be the end of it."""
        mark = self.ledger.mark()
        folder = self.folder / f"step-{state.step:08d}"
        writing = folder.with_name(WRITING_PREFIX + folder.name)
        shutil.rmtree(writing, ignore_errors=True)  # left by a life that was killed while it wrote
        writing.mkdir(parents=True)
        (writing / "weights.txt").write_text(state.weights)
        at("checkpoint-half")
        files = {"weights.txt": len(state.weights)}
        passes = {"first_remembered_pass": state.first_remembered_pass}
        manifest = {"step": state.step, **self._identity, **passes, "ledger": mark, "files": files}
        (writing / MANIFEST).write_text(json.dumps(manifest))
        at("checkpoint-written")
        shutil.rmtree(folder, ignore_errors=True)
        writing.rename(folder)
        at("checkpoint-durable")
        for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
