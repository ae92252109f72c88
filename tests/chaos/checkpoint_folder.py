"""The stand-in trainer's checkpoints and ledger, in the real trainer's layout, for `quartet audit`.

Each trainer has its own folder. The one that takes over copies the newest checkpoint from the other's folder if it is
newer. A replaced trainer that resumes in the middle of a write therefore cannot damage the active one's folder.
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
    """The weights, and what is needed to resume from them."""

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
        """Restore the newest complete checkpoint of this folder or the others, with its ledger.

        Raises:
            OSError, LedgerError: another trainer changed its folder during the copy; retry.
        """
        found = [newest for folder in (self.folder, *others) if (newest := newest_checkpoint(folder))]
        if not found:
            self.ledger.rewind(None)
            return State()
        path, manifest = max(found, key=lambda each: each[1]["step"])  # its own if both have the same step
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
        """Write a checkpoint atomically. `at` is called at each point of the write, and may kill this process."""
        mark = self.ledger.mark()
        folder = self.folder / f"step-{state.step:08d}"
        writing = folder.with_name(WRITING_PREFIX + folder.name)
        shutil.rmtree(writing, ignore_errors=True)  # left by an interrupted write
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
