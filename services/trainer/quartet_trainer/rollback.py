"""Goes back to the weights of an earlier checkpoint, while the trainer is stopped: the trainer's half of
`quartet rollback`.

python -m quartet_trainer.rollback FOLDER RUN --to STEP --max-staleness N

What was trained stays settled: the ledger only grows. The new checkpoint has the model, the optimizer and the critic of
STEP, and a step number that no weights had before. It is above the newest trained step by more than `max_staleness`, so
that every group of the abandoned weights, also one that is still generated, is stale. The ledger has the steps between
without a group. The old checkpoints stay valid until the new one is complete.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet_common.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from quartet_common.text import one_line
from quartet_trainer.checkpoints import (
    CheckpointFolder,
    atomic_folder,
    checkpoint_folder,
    find_checkpoints,
    locked_folder,
)
from quartet_trainer.errors import TrainingError


def roll_back(root: Path, run_id: str, to: int, max_staleness: int) -> dict[str, Any]:
    """Write the new checkpoint. Return its "step" and "path", and the step that was the newest, "from".

    If the newest checkpoint is of the same rollback, it is returned.

    Raises:
        TrainingError: a trainer uses the folder, it lacks the checkpoint, or it is another run's.
        LedgerError: the ledger does not belong to the newest checkpoint.
        OSError: a file cannot be written.
    """
    if not root.is_dir():
        raise TrainingError(f"there is no folder '{root}'; name the trainer's with --checkpoints")
    with locked_folder(root, time.sleep):
        kept = {each.step: each for each in find_checkpoints(root)}
        newest, source = kept[max(kept)] if kept else None, kept.get(to)
        if newest is None or newest.manifest.get("run_id") != run_id or not newest.manifest.get("ledger"):
            raise TrainingError(f"'{root}' has no checkpoint of run '{run_id}' with a ledger; name another folder")
        before = newest.manifest.get("rolled_back", {})
        if before.get("to") == to:
            return {"step": newest.step, "path": str(newest.path), "from": before["from"]}
        if source is None or source is newest:
            steps = ", ".join(str(step) for step in kept if step != newest.step)
            raise TrainingError(
                f"--to: got {to}, and '{root}' has the newest checkpoint, of step {newest.step}; allowed: the steps of "
                f"the earlier ones, {steps or 'of which there is none'}"
            )
        mark = _add_steps(root / LEDGER_FILE, newest, max_staleness)
        path = _copy(root, source, newest, mark)
    return {"step": mark["steps"], "path": str(path), "from": newest.step}


def _add_steps(path: Path, newest: CheckpointFolder, max_staleness: int) -> dict[str, Any]:
    """Add steps without a group to the ledger; return the mark of all of it."""
    read_ledger(path, newest.manifest["ledger"])  # refuses one that is not the checkpoint's
    ledger = Ledger(path)
    try:
        lines = read_ledger(path, ledger.mark())
        trained = len(lines)
        while trained > newest.step and not lines[trained - 1][1]:
            trained -= 1  # added by a rollback that was interrupted
        for step in range(len(lines), trained + max_staleness + 1):
            ledger.append(step, [])
        return ledger.mark()
    finally:
        ledger.close()


def _copy(root: Path, source: CheckpointFolder, newest: CheckpointFolder, mark: dict[str, Any]) -> Path:
    """Write the checkpoint of the ledger's last step with the files of `source`, for the data passes of `newest`."""
    step = mark["steps"]
    facts = {
        **source.manifest,
        "first_remembered_pass": newest.manifest.get("first_remembered_pass", 0),
        "ledger": mark,
        "step": step,
        # The learning rate goes on as after `source`.
        "undone_steps": step - source.step + source.manifest.get("undone_steps", 0),
        "rolled_back": {"to": source.step, "from": newest.step},
    }
    path = checkpoint_folder(root, step)
    with atomic_folder(path, facts) as writing:
        for name in source.manifest["files"]:
            (writing / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, writing / name)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 2 refused, with a sentence on standard error. Standard output is JSON."""
    parser = argparse.ArgumentParser(prog="python -m quartet_trainer.rollback", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--max-staleness", type=int, required=True)
    arguments = parser.parse_args(argv)
    try:
        print(json.dumps(roll_back(arguments.folder, arguments.run, arguments.to, arguments.max_staleness)))
    except (TrainingError, LedgerError) as error:
        print(one_line(str(error)), file=sys.stderr)
        return 2
    except OSError as error:
        print(one_line(f"'{error.filename}' cannot be written ({error.strerror}); make room"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
