"""Goes back to the weights of an earlier checkpoint, while the trainer is stopped, for `quartet rollback`.

python -m quartet_trainer.rollback FOLDER RUN STEP

What was trained stays settled: the ledger only grows. The new checkpoint has the model, the optimizer and the critic of
STEP, and a step number that no weights had before. It is above the newest trained step by more than `max_staleness`, so
that every group of the abandoned weights, also one that is still generated, is stale. The ledger has the steps between
without a group. The old checkpoints stay valid until the new one is complete.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from quartet_common.checkpoints import MANIFEST
from quartet_common.ledger import LEDGER_FILE, Ledger, LedgerError, Mark, read_ledger
from quartet_common.text import one_line
from quartet_trainer import checkpoints
from quartet_trainer.checkpoints import CheckpointFolder
from quartet_trainer.errors import TrainingError


def roll_back(root: Path, run_id: str, to: int) -> dict[str, Any]:
    """Write the new checkpoint. Return its "step" and "path"; of a rollback that is done already, those that it has.

    Raises:
        TrainingError: a trainer uses the folder, it lacks the checkpoint, or it is another run's.
        LedgerError: the ledger does not belong to the newest checkpoint.
        OSError: a file cannot be written.
    """
    if not root.is_dir():
        raise TrainingError(f"there is no folder '{root}'; name the trainer's with --checkpoints")
    with checkpoints.locked_folder(root, time.sleep):
        kept = {each.step: each for each in checkpoints.find_checkpoints(root)}
        newest, source = kept[max(kept)] if kept else None, kept.get(to)
        if newest is None or newest.manifest.get("run_id") != run_id or "max_staleness" not in newest.manifest:
            whose = f"the newest checkpoint in '{root}' is not of run '{run_id}', or of an earlier release"
            raise TrainingError(f"{whose}; name another folder, or start the trainer and stop it")
        if newest.manifest.get("rolled_back", {}).get("to") == to:
            return {"step": newest.step, "path": str(newest.path)}
        if source is None or source is newest:
            raise TrainingError(
                f"--to: got {to}, and '{root}' has the newest checkpoint, of step {newest.step}; allowed: the steps of "
                f"the earlier ones, {', '.join(map(str, sorted(kept)[:-1])) or 'of which there is none'}"
            )
        mark = _add_steps(root / LEDGER_FILE, newest)
        return {"step": mark["steps"], "path": str(_copy(source, newest, mark))}


def _add_steps(path: Path, newest: CheckpointFolder) -> Mark:
    """Add steps without a group to the ledger; return the mark of all of it."""
    read_ledger(path, newest.manifest["ledger"])  # refuses one that is not the checkpoint's
    ledger = Ledger(path)
    lines = read_ledger(path, ledger.mark())
    trained = len(lines)
    while trained > newest.step and not lines[trained - 1][1]:
        trained -= 1  # added by a rollback that was interrupted
    for step in range(len(lines), trained + newest.manifest["max_staleness"] + 1):
        ledger.append(step, [])
    mark = ledger.mark()
    ledger.close()
    return mark


def _copy(source: CheckpointFolder, newest: CheckpointFolder, mark: Mark) -> Path:
    """Write the checkpoint of the ledger's last step with the files of `source`, for the data passes of `newest`."""
    step, undone = mark["steps"], source.manifest.get("undone_steps", 0)
    facts = {
        **source.manifest,
        **{key: newest.manifest[key] for key in ("first_remembered_pass", "max_staleness")},
        "step": step,
        "ledger": mark,
        "rolled_back": {"to": source.step, "from": newest.step},
        "undone_steps": step - source.step + undone,  # so that the learning rate goes on as after `source`
    }
    path = checkpoints.checkpoint_folder(newest.path.parent, step)
    with checkpoints.atomic_folder(path, facts) as writing:
        shutil.copytree(source.path, writing, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
    return path


def main(folder: str, run_id: str, to: str) -> int:
    """Return the exit status: 0 done, 2 refused, with a sentence on standard error. Standard output is JSON."""
    try:
        print(json.dumps(roll_back(Path(folder), run_id, int(to))))
        return 0
    except (TrainingError, LedgerError) as error:
        print(one_line(str(error)), file=sys.stderr)
    except OSError as error:
        print(one_line(f"'{error.filename}' cannot be written ({error.strerror}); make room"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
