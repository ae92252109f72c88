"""Supervised fine-tuning of the demo's untrained model by `quartet sft`, and the accuracy of its checkpoints."""

import json
import subprocess
from pathlib import Path

from curve_cases import Case

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples" / "arithmetic" / "sft.toml"
UNTRAINED = ROOT / ".quartet" / "arithmetic" / "untrained"
RUN_SECONDS = 420.0
INTERVAL = 200  # steps between checkpoints


def fine_tune(run_folder: Path, run_id: str, case: Case, seed: int) -> list[tuple[int, float]]:
    """Train, and return (optimizer steps, accuracy on held-out problems when sampled) of each checkpoint.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    settings = {
        "run.id": run_id,
        "run.folder": run_folder,
        "sft.shuffle_seed": seed,
        "trainer.seed": seed,
        "trainer.checkpoint.interval": INTERVAL,
        "trainer.checkpoint.keep_last": 100,
        **dict(setting.split("=", 1) for setting in case.settings),
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [ROOT / ".quartet/envs/client/bin/quartet", "sft", RUN_FILE, *words]
    with (run_folder / "output.txt").open("w") as output:
        subprocess.run(command, check=True, timeout=RUN_SECONDS, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    folders = sorted((run_folder / "checkpoints").glob("step-*/model"))
    return [(0, accuracy(UNTRAINED)), *((int(each.parent.name[5:]), accuracy(each)) for each in folders)]


def accuracy(model: Path) -> float:
    """Measure a model folder with plain transformers."""
    command = [ROOT / ".quartet/envs/trainer/bin/python", "-W", "ignore", "examples/arithmetic/check.py", model]
    done = subprocess.run(command, check=True, timeout=RUN_SECONDS, cwd=ROOT, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["sampled_accuracy"]
