"""The long form: `.quartet/envs/dev/bin/python tests/resume/run.py [--steps 40] [--kills 20] [--seed 1]`."""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import resume


def main() -> int:
    """Return 0 if every group was trained exactly once and both runs end with the same weights."""
    parser = argparse.ArgumentParser(description="Kill the trainer at random moments; compare with a run left alone.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where all is left; default: a temporary folder, removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quartet-resume-") as temporary, closing(resume.Pythons()) as pythons:
        folder = arguments.folder or Path(temporary)
        began = time.monotonic()
        model, steps = folder / "model", arguments.steps
        resume.make_models(pythons["trainer"], model)
        unkilled = resume.train(folder / "unkilled", pythons, model, steps)
        kills = resume.draw(arguments.seed, steps, arguments.kills)
        killed = resume.train(folder / "killed", pythons, model, steps, kills)
        right, text = resume.summary(killed, unkilled, steps)
        print(f"{text}\nresume     seed {arguments.seed}, {time.monotonic() - began:.0f} s", flush=True)
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
