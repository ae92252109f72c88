"""Seconds from `quartet run` to the first trained step, and what the answer to a mistake costs, beside their limits.

- A start: the demo's run file with each engine, without the evaluation before training. Environments, model and
  bytecode are there: the first start is not counted. The least of three.
- A mistake: processor time of all processes until a run file with an unknown key, a wrong path or a wrong value is
  refused, with and without `--dry-run`. The greatest of their least of three.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ENVIRONMENTS, ROOT, Figure, process, report

PREPARE = [ENVIRONMENTS / "trainer" / "bin" / "python", "examples/arithmetic/prepare.py", ".quartet/arithmetic"]
QUARTET = [str(ENVIRONMENTS / "client" / "bin" / "quartet"), "run", "examples/arithmetic/run.toml"]
START_LIMITS = {"vllm": 12.0, "transformers": 6.0}  # seconds
MISTAKES = {
    "an unknown key": "trainer.learing_rate=1e-4",
    "a wrong path": "model.path=nowhere",
    "a wrong value": "run.group_size=many",
}
MISTAKE_LIMIT = 3.0  # seconds of processor time
ROUNDS = 3
SECONDS = 240.0


def main() -> None:
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(PREPARE, check=True, stdout=sys.stderr)
    figures = []
    for engine, limit in START_LIMITS.items():
        measured = [start(engine) for _ in range(1 + ROUNDS)]
        print(engine, [round(seconds, 1) for seconds in measured], file=sys.stderr, flush=True)
        name = f"start: command to first step, {engine}"
        figures.append(Figure(name, "s", min(measured[1:]), limit, "limit", "lower"))
    costs = []
    for what, mistake in MISTAKES.items():
        for options in ([], ["--dry-run"]):
            costs.append(min(refusal(mistake, options) for _ in range(ROUNDS)))
            print(what, *options, round(costs[-1], 2), file=sys.stderr, flush=True)
    figures.append(Figure("start: answer to a mistake", "s of CPU", max(costs), MISTAKE_LIMIT, "limit", "lower"))
    report(*figures)


def start(engine: str) -> float:
    """The seconds from the command to the first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        values = {"run.folder": folder, "rollout.engine": engine, "trainer.evaluation.before_training": "false"}
        settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        began, log = time.time(), Path(name) / "log"
        with process([*QUARTET, "--plain", *settings], log) as running:
            while (done := first_step(folder / "metrics.jsonl")) is None:
                if running.poll() is not None or time.time() - began > SECONDS:
                    raise RuntimeError(f"no step within {time.time() - began:.0f} s: {log.read_text()[-2000:]}")
                time.sleep(0.05)
    return done - began


def first_step(metrics: Path) -> float | None:
    """When the run's first step ended; None before that."""
    with contextlib.suppress(FileNotFoundError):
        line, end, _ = metrics.read_text().partition("\n")
        return float(json.loads(line)["time"]) if end else None
    return None


def refusal(mistake: str, options: list[str]) -> float:
    """The processor time of a command that is refused, and of the processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*QUARTET, *options, "--set", mistake], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr.decode()
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
