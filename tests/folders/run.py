"""Model folders of several versions of transformers can be trained, and each reads the exports: `make folders`.

Each version, in its own environment from the package index, writes tiny models; the trainer makes a step with each and
exports it; then every version reads every export, and must compute the same log-probs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "deploy" / "local"))

from environments import torch_options  # noqa: E402
from installer import STATE, ensure_uv, run_command  # noqa: E402

VERSIONS = ("4.51.3", "4.57.6")
TRAINER = ROOT / ".quartet/envs/trainer/bin/python"
NEAR = 1e-5
"""Tolerance of log-probs."""
_TRAIN = """
import sys
from pathlib import Path
from learner_helpers import Run, make_batch, settings
from quartet_trainer.learner import create_learner
for folder in map(Path, sys.argv[1:]):
    learner = create_learner(settings(precision="fp32", learning_rate=1e-2), folder, Run())
    learner.train_step(make_batch())
    learner.export(folder / "export")
"""


def environment(version: str) -> Path:
    """Return the Python of an environment with a version of transformers; make it if necessary."""
    folder = STATE / "envs" / f"transformers-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        uv, what = ensure_uv(), f"transformers {version}"
        packages = ("torch==2.13.0", f"transformers=={version}", "numpy", "safetensors")
        run_command(what, [str(uv), "venv", "--python", "3.11", str(folder)])
        command = ["pip", "install", "--python", str(python), *packages, *torch_options("cpu", os.environ)]
        run_command(what, [str(uv), *command])
    return python


def models(python: Path, *arguments: str | Path) -> str:
    done = subprocess.run([python, ROOT / "tests/folders/models.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def main() -> int:
    pythons = {version: environment(version) for version in VERSIONS} | {"the trainer's": TRAINER}
    with tempfile.TemporaryDirectory() as place:
        for number, python in enumerate(pythons.values()):
            models(python, "save", Path(place) / str(number))
        folders = sorted(Path(place).glob("*/*"))
        helpers = {"PYTHONPATH": str(ROOT / "services/trainer/tests")}
        subprocess.run([TRAINER, "-c", _TRAIN, *folders], env={**os.environ, **helpers}, check=True)
        exports = [folder / "export" for folder in folders]
        found = {name: json.loads(models(python, "log-probs", *exports)) for name, python in pythons.items()}
    failed = 0
    for export in map(str, exports):
        expected = found["the trainer's"][export]
        for reader, read in found.items():
            worst = max((abs(a - b) for a, b in zip(read[export], expected, strict=True)), default=1.0)
            writer = list(pythons)[int(Path(export).parts[-3])]
            print(f"{Path(export).parts[-2]:<12} of {writer:<14} by {reader:<14} {worst:.1e}")
            failed += worst > NEAR
    print(f"{failed} differ" if failed else "all alike")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
