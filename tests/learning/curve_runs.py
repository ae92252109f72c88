"""One learning curve: a run of the four services in its own folder, and its stored result."""

import contextlib
import hashlib
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import sft_runs
from curve_cases import CASES, MIXTURE, Case

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "integration"))

from by_hand import ByHand  # noqa: E402
from preloaded import Pythons  # noqa: E402

PREPARED = ROOT / ".quartet" / "arithmetic"
RUN_FILE = Path(__file__).with_name("curves.toml")
RUN_SECONDS = 420.0


@dataclass(frozen=True)
class Result:
    """The result of a finished run, as in `result.json`."""

    case: str
    seed: int
    digest: str
    steps: int
    evaluations: list[tuple[int, float]]
    """(optimizer steps, held-out accuracy)"""
    staleness: float
    """Mean over steps of `staleness/mean`."""
    seconds: float
    start: float | None = None
    """Held-out accuracy of the weights that it starts from, as its teacher's run measured it; None: its own first."""
    lift_of_teacher: float = 0.0
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(optimizer steps, tokens generated for them), at each evaluation"""

    def tokens_until(self, accuracy: float) -> int | None:
        """Tokens generated until the first evaluation with this held-out accuracy; None: it was not reached."""
        return next((dict(self.tokens)[step] for step, found in self.evaluations if found >= accuracy), None)

    @property
    def lift(self) -> float:
        """Held-out accuracy at the end less that at the start."""
        return self.evaluations[-1][1] - (self.evaluations[0][1] if self.start is None else self.start)


class RunFailed(Exception):
    """A run failed; the text has the reason."""


def prepare(pythons: Pythons) -> None:
    """Make the warmed-up model and data of all runs, unless they exist."""
    subprocess.run([pythons["trainer"], ROOT / "examples/arithmetic/prepare.py", PREPARED], check=True, timeout=900)


def digest(case: Case, seed: int) -> str:
    """Return a digest of a run's settings, model and data, without the code under test."""
    content = [RUN_FILE.read_bytes(), (PREPARED / "model" / "recipe.txt").read_bytes()]
    content += [repr((case.settings, case.shuffled, seed)).encode()]
    content += [repr(MIXTURE).encode()] if case.mixture else []
    content += [sft_runs.RUN_FILE.read_bytes()] if case.sft else []
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:16]


def kept(folder: Path, case: Case, seed: int) -> Result | None:
    """Return the result of a run that was finished with the same settings, else None."""
    path = folder_of(folder, case, seed) / "result.json"
    if not path.is_file():
        return None
    told = json.loads(path.read_text())
    if told["digest"] != digest(case, seed):
        return None
    return Result(**{each.name: told[each.name] for each in fields(Result) if each.name in told})


def folder_of(folder: Path, case: Case, seed: int) -> Path:
    return folder / f"{case.name.replace(', ', '-').replace(' ', '')}-seed{seed}"


def do(folder: Path, pythons: Pythons, case: Case, seed: int) -> Result:
    """Execute a run from the start, and store its result. Raises RunFailed."""
    place = folder_of(folder, case, seed)
    run_folder = place / time.strftime("run-%Y%m%d-%H%M%S")
    run_folder.mkdir(parents=True)
    run_id = f"{place.name}-{run_folder.name}"
    if case.sft:
        result = fine_tuned(run_folder, run_id, case, seed)
    else:
        result = trained(folder, pythons, run_folder, run_id, case, seed)
    (place / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    return result


def fine_tuned(run_folder: Path, run_id: str, case: Case, seed: int) -> Result:
    """Execute a run of supervised fine-tuning. Raises RunFailed."""
    began = time.monotonic()
    try:
        evaluations = sft_runs.fine_tune(run_folder, run_id, case, seed)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
        raise RunFailed(f"{run_folder}: {failure}") from failure
    steps, seconds = evaluations[-1][0], round(time.monotonic() - began, 1)
    return Result(case.name, seed, digest(case, seed), steps, evaluations, staleness=0.0, seconds=seconds)


def trained(folder: Path, pythons: Pythons, run_folder: Path, run_id: str, case: Case, seed: int) -> Result:
    """Execute a run of the four services. Raises RunFailed."""
    place = run_folder.parent
    settings = {"run.id": run_id, "run.folder": run_folder, "data.shuffle_seed": seed, "trainer.seed": seed}
    settings |= dict(setting.split("=", 1) for setting in case.settings)
    if case.shuffled:
        settings["data.train"] = shuffled(place, seed)
    taught = {}
    if case.teacher:
        settings["trainer.reference.model"], teacher = teacher_of(folder, case)
        taught = {"start": teacher.evaluations[0][1], "lift_of_teacher": teacher.lift}
    if case.mixture:
        settings["data.train"] = mixed(place)
    began = time.monotonic()
    with contextlib.closing(ByHand(run_folder, RUN_FILE, pythons, settings)) as services:
        try:
            services.run_all(RUN_SECONDS)
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            raise RunFailed(f"{run_folder}: {failure}") from failure
    result = read(run_folder / "metrics.jsonl", case, seed, time.monotonic() - began)
    return replace(result, **taught)


def teacher_of(folder: Path, case: Case) -> tuple[Path, Result]:
    """Return the model of a case's teacher, and its result. Raises RunFailed if it has not been trained."""
    teacher = next(each for each in CASES if each.name == case.teacher)
    seed = teacher.seeds[0]
    models = sorted(folder_of(folder, teacher, seed).glob("run-*/model"))
    if (result := kept(folder, teacher, seed)) is None or not models:
        raise RunFailed(f"its teacher is not there: run the case '{case.teacher}' first")
    return models[-1], result


def shuffled(place: Path, seed: int) -> Path:
    """Write the training problems with shuffled answers; return the file."""
    problems = [json.loads(line) for line in (PREPARED / "train.jsonl").read_text().splitlines()]
    answers = [problem["gt_answer"] for problem in problems]
    random.Random(seed).shuffle(answers)
    path = place / "train.jsonl"
    rows = ({**problem, "gt_answer": answer} for problem, answer in zip(problems, answers, strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed(place: Path) -> str:
    """Write the three sources of the mixture, disjoint thirds of the training problems; return data.train."""
    problems = [json.loads(line) for line in (PREPARED / "train.jsonl").read_text().splitlines()]
    random.Random(0).shuffle(problems)
    changes = {
        "fair": {},  # as they are
        "easy": {"verifiers": [{"file": "tests/learning/curve_rewards.py:any_answer"}]},
        "hopeless": {"gt_answer": "100"},
    }
    sources = []
    for n, (name, change) in enumerate(changes.items()):
        path = place / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**problem, **change}) + "\n" for problem in problems[n::3]))
        sources.append(f"{{path = {json.dumps(str(path))}, weight = {MIXTURE[name]}}}")
    return f"[{', '.join(sources)}]"


def read(metrics: Path, case: Case, seed: int, seconds: float) -> Result:
    """Read a finished run's metrics. Raises RunFailed if evaluations are missing."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [(row["step"], row["eval/heldout/ans_acc"]) for row in rows if row["kind"] == "evaluation"]
    if len(evaluations) < 2 or evaluations[0][0] != 0 or evaluations[-1][0] != len(steps):
        raise RunFailed(f"evaluations at {[step for step, _ in evaluations]} of {len(steps)} steps: {metrics}")

    generated = [0]
    for row in steps:
        generated.append(generated[-1] + int(row["batch/completion_tokens"]))
    return Result(
        case=case.name,
        seed=seed,
        digest=digest(case, seed),
        steps=len(steps),
        evaluations=evaluations,
        staleness=round(sum(row["staleness/mean"] for row in steps) / len(steps), 3),
        seconds=round(seconds, 1),
        tokens=[(step, generated[step]) for step, _ in evaluations],
    )
