"""Makes the model and data of the demo's run file. Runs in the trainer's environment, from the checkout.

    .quartet/envs/trainer/bin/python examples/arithmetic/prepare.py .quartet/arithmetic

The model is warmed up by `quartet sft` (warm_up.toml), with rows in this order:

1. *Skill*: 550 steps of sums that are worked out. The model learns to add.
2. *Habit*: 90 steps of demonstrations that mostly guess; the others contain mistakes.

It can then work sums out but seldom does: about one sampled answer in five is right. Reinforcement learning teaches it
to work them out and to avoid mistakes; it learned arithmetic from the skill rows.

A model that was made by the same recipe is kept; a warm-up that was stopped goes on.
"""

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from task import answer, habit, split, worked

HERE = Path(__file__).parent
QUARTET = HERE.parents[1] / ".quartet/envs/client/bin/quartet"
RECIPE = ("task.py", "model.py", "prepare.py", "warm_up.toml")
EVALUATION_PROBLEMS = 256
SKILL_ROWS, HABIT_ROWS = 550 * 32, 90 * 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)

    train, held_out = split()
    write_rows(folder / "train.jsonl", map(problem_row, train))
    # A sample, because the problems are ordered and a prefix would not be representative.
    write_rows(folder / "heldout.jsonl", map(problem_row, random.Random(0).sample(held_out, EVALUATION_PROBLEMS)))

    made_by = folder / "model" / "recipe.txt"
    recipe = digest(arguments.seed)
    if made_by.is_file() and made_by.read_text() == recipe:
        print(f"  kept: {folder}/model, warmed up by the same recipe", file=sys.stderr)
        return 0
    run = folder / f"warm-up-{recipe[:8]}"
    status = warm_up(folder, run, train, arguments.seed)
    if status == 0:
        shutil.rmtree(folder / "model", ignore_errors=True)
        (run / "model").rename(folder / "model")
        made_by.write_text(recipe)
        shutil.rmtree(run)
    return status


def warm_up(folder: Path, run: Path, train: list[str], seed: int) -> int:
    """Make `folder`/untrained, and `run`/model from it. Return the status of `quartet sft`."""
    from model import build_model, build_tokenizer, save  # imports torch, which takes seconds

    untrained, rng = folder / "untrained", random.Random(seed)
    save(build_model(seed), build_tokenizer(), untrained)
    rows = [{"prompt": problem, "completion": worked(problem, rng)} for problem in rng.choices(train, k=SKILL_ROWS)]
    rows += [{"prompt": problem, "completion": habit(problem, rng)} for problem in rng.choices(train, k=HABIT_ROWS)]
    write_rows(folder / "warm_up.jsonl", rows)
    paths = {"run.folder": run, "model.path": untrained, "sft.data": folder / "warm_up.jsonl"}
    settings = [word for key, path in paths.items() for word in ("--set", f"{key}={path}")]
    return subprocess.run([QUARTET, "sft", HERE / "warm_up.toml", *settings], check=False).returncode


def digest(seed: int) -> str:
    """Return a digest of everything the model depends on."""
    content = b"".join((HERE / name).read_bytes() for name in RECIPE) + str(seed).encode()
    return hashlib.sha256(content).hexdigest()


def problem_row(problem: str) -> dict[str, str]:
    """Return the row of a prompt: id, prompt, reference answer."""
    return {"id": problem, "prompt": problem, "gt_answer": str(answer(problem))}


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
