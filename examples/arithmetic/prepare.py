"""Makes the model and data of the demo's run file. Runs in the trainer's environment.

    .quartet/envs/trainer/bin/python examples/arithmetic/prepare.py .quartet/arithmetic

A model that was made by the same recipe is kept.
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

from task import answer, split

HERE = Path(__file__).parent
RECIPE = ("task.py", "model.py", "warm_up.py")
EVALUATION_PROBLEMS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)

    train, held_out = split()
    write_problems(folder / "train.jsonl", train)
    # A sample, because the problems are ordered and a prefix would not be representative.
    write_problems(folder / "heldout.jsonl", random.Random(0).sample(held_out, EVALUATION_PROBLEMS))

    made_by = folder / "model" / "recipe.txt"
    recipe = digest(arguments.seed)
    if made_by.is_file() and made_by.read_text() == recipe:
        report = json.loads((folder / "model" / "warm_up.json").read_text())
        print(f"  kept: {folder}/model, warmed up in {report['seconds']} s by the same recipe", file=sys.stderr)
        return 0
    from warm_up import warm_up  # imports torch, which takes seconds and is only needed for a new model

    made_by.unlink(missing_ok=True)
    if not warm_up(folder / "model", arguments.seed):
        return 1
    made_by.write_text(recipe)
    return 0


def digest(seed: int) -> str:
    """Return a digest of everything the model depends on."""
    content = b"".join((HERE / name).read_bytes() for name in RECIPE) + str(seed).encode()
    return hashlib.sha256(content).hexdigest()


def write_problems(path: Path, problems: list[str]) -> None:
    """Write one JSON object per line: id, prompt, reference answer."""
    lines = (json.dumps({"id": p, "prompt": p, "gt_answer": str(answer(p))}) + "\n" for p in problems)
    path.write_text("".join(lines))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
