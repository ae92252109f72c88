"""A run of GRPO by the four services, and the same by TRL's `GRPOTrainer`: rates and accounts of a step.

Both train the same model on the same problems with the same reward, at temperature 1, AdamW at the same rate, clip
0.2 / 0.28, token mean, no KL, float32, one optimizer step a batch. Rates are measured from the end of an early step to
the end of the last one, without start, evaluations and checkpoints, which neither makes.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import psutil
from measuring import ENVIRONMENTS, ROOT

MODEL_DATA = ROOT / ".quartet" / "arithmetic"
RUN_FILE = ROOT / "examples" / "arithmetic" / "run.toml"
LAST_STEPS = 20
LEARNING_RATE = 3e-4
PHASES = {
    "time/waiting_for_batch": "waits for the batch",
    "time/forward": "forward",
    "time/backward": "backward",
    "time/optimizer": "optimizer",
    "time/publishing": "publish weights (what is waited for)",
}
# What a run's processes are there for, by a word of their command line; the first that fits counts.
WORK = {
    "redis-server": "queue: Redis",
    "quartet_broker": "queue: broker",
    "quartet_reward": "score: reward service and its workers",
    "quartet_rollout": "generate: rollout",
    "quartet_trainer": "train: trainer",
    "quartet": "launch, feed, show",
}


@dataclass(frozen=True)
class Size:
    """A model, a step, and how long the rounds are."""

    name: str
    model: Path
    prompts: int
    """Of a step."""
    new_tokens: int
    steps: int
    leave_out: int
    """First steps that are not measured."""
    skip_zero_advantage: bool
    trainer_threads: int
    completions: int = 8
    """Of a prompt."""
    data: Path = MODEL_DATA / "train.jsonl"
    lora: int = 0
    """Rank of the adapters; 0: the whole model is trained."""
    peer_steps: int = 0
    """TRL's steps, where a few say enough: one is like the other. 0: as many as ours."""
    early: int = 0
    """Steps after which a rate is taken too."""
    seconds: float = 300.0
    """Limit of a round: many times what a quiet machine needs."""

    @property
    def batch(self) -> int:
        """Completions of a step."""
        return self.prompts * self.completions

    @property
    def trl_steps(self) -> int:
        return self.peer_steps or self.steps

    @property
    def trl_leave_out(self) -> int:
        return 1 if self.peer_steps else self.leave_out


@dataclass
class Round:
    """The result of a side's round."""

    rate: float
    """Completions per second."""
    length: float
    """Tokens of a completion, mean over the measured steps."""
    zero_variance: float
    """Share of groups whose rewards were all equal, mean over the measured steps."""
    reward: float
    """Mean of the last steps: both sides learn."""
    account: dict[str, float]
    """Milliseconds of a step by what they went to, and counts."""
    early_rate: float = 0.0
    """That of the measured ones of the first `Size.early` steps."""
    parts: list[tuple[float, float]] = field(default_factory=list)
    """Of ours, milliseconds of each measured step: waiting for its batch, and the rest."""


# --- The sides --------------------------------------------------------------------------------------------------------


def trl(size: Size, threads: int, micro_batch: int = 0) -> Round:
    """Train with TRL, `micro_batch` completions at a time (0: a step's). Raises RuntimeError if it fails."""
    options = {
        "steps": size.trl_steps,
        "prompts": size.prompts,
        "completions": size.completions,
        "micro_batch": micro_batch or size.batch,
        "lora": size.lora,
        "new_tokens": size.new_tokens,
        "learning_rate": LEARNING_RATE,
        "threads": threads,
    }
    python = ENVIRONMENTS / "bench-trl" / "bin" / "python"
    command = [python, ROOT / "benchmarks" / "trl_side.py", size.model, size.data, json.dumps(options)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    try:
        done = subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=size.seconds
        )
    except subprocess.TimeoutExpired:
        hint = "where other work runs, its threads wait for each other: use a quiet machine"
        raise RuntimeError(f"TRL with {threads} threads is not done after {size.seconds:.0f} s; {hint}") from None
    if done.returncode:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    record = json.loads(done.stdout.splitlines()[-1])
    ends, cpu, first = record["ends"], record["cpu"], size.trl_leave_out
    count, seconds = len(ends) - first, ends[-1] - ends[first - 1]
    return Round(
        rate=size.batch * count / seconds,
        length=statistics.mean(record["length"][first:]),
        zero_variance=statistics.mean(record["zero_variance"][first:]),
        reward=statistics.mean(record["reward"][-LAST_STEPS:]),
        account={
            "step": 1000 * seconds / count,
            "processor, all of it": 1000 * (cpu[-1] - cpu[first - 1]) / count,
        },
        early_rate=early_rate(size, ends),
    )


def ours(size: Size, engine: str, staleness: int = 1, pinned: Mapping[str, int] | None = None) -> Round:
    """Train with the four services. Raises RuntimeError if it fails.

    `pinned`: the core that each of WORK's values has for itself; the others share all.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        settings = {
            "run.id": "peer",
            "run.folder": folder,
            "run.max_steps": size.steps,
            "run.max_staleness": staleness,
            "run.groups_per_step": size.prompts,
            "run.group_size": size.completions,
            "run.sampling.max_new_tokens": size.new_tokens,
            "model.path": size.model,
            "data.train": size.data,
            "rollout.engine": engine,
            "trainer.learning_rate": LEARNING_RATE,
            "trainer.skip_zero_advantage": str(size.skip_zero_advantage).lower(),
            "trainer.evaluation.interval": 0,
            "trainer.evaluation.before_training": "false",
            "trainer.evaluation.at_end": "false",
            "trainer.tensorboard": "false",
            "trainer.samples_interval": 0,
            "trainer.rollout_log_interval": 0,
            "trainer.checkpoint.interval": 0,
            "trainer.torch_threads": size.trainer_threads,
            "trainer.lora.r": size.lora,
        }
        command = [str(ENVIRONMENTS / "client" / "bin" / "quartet"), "run", str(RUN_FILE), "--plain"]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (Path(temporary) / "output.log").open("w+") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
            try:
                used = watch(process, folder / "metrics.jsonl", size, pinned or {})
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
            output.seek(0)
            if process.returncode:
                raise RuntimeError(f"the run failed: {output.read()[-2000:]}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    measured = steps[size.leave_out :]
    wall = measured[-1]["time"] - steps[size.leave_out - 1]["time"]

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in measured)

    step = mean("time/step")
    account = {f"trainer: {said}": mean(name) for name, said in PHASES.items()}
    account["trainer: lease, decode, report"] = mean("time/training") - mean("time/train_step")
    phases = ("waiting_for_batch", "training", "publishing", "checkpointing", "evaluating", "paused")
    account["trainer: unaccounted"] = step - sum(mean(f"time/{name}") for name in phases)
    account = {name: 1000 * seconds for name, seconds in account.items()} | {"step": 1000 * step}
    processor = {f"processor, {name}": 1000 * seconds / len(measured) for name, seconds in used.items()}
    account |= processor | {"processor, all of it": sum(processor.values())}
    account |= {f"% idle, {name}": 100 * (1 - seconds / len(measured) / step) for name, seconds in used.items()}
    account["completions spared (advantage 0)"] = mean("batch/completions_skipped")
    account["staleness, steps"] = mean("staleness/mean")
    return Round(
        rate=sum(row["batch/completions"] for row in measured) / wall,
        length=mean("completions/mean_length"),
        zero_variance=mean("reward/frac_zero_std"),
        reward=statistics.mean(row["reward/mean"] for row in steps[-LAST_STEPS:]),
        account=account,
        early_rate=early_rate(size, [row["time"] for row in steps]),
        parts=[(1000 * (wait := row["time/waiting_for_batch"]), 1000 * (row["time/step"] - wait)) for row in measured],
    )


def early_rate(size: Size, ends: list[float]) -> float:
    """Return the completions per second of the measured ones of the first `early` steps, by the steps' ends."""
    if not size.early:
        return 0.0
    seconds = ends[size.early - 1] - ends[size.leave_out - 1]
    return size.batch * (size.early - size.leave_out) / seconds


# --- What the processes of a run use ----------------------------------------------------------------------------------


def watch(process: subprocess.Popen, metrics: Path, size: Size, pinned: Mapping[str, int]) -> dict[str, float]:
    """Wait for the run's end; return the processor seconds of each service over the measured steps.

    Raises RuntimeError if the run is not over in time.
    """
    deadline = time.monotonic() + size.seconds
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run is not over after {size.seconds:.0f} s")
        done = metrics.read_text().count('"kind": "step"') if metrics.exists() else 0
        if done >= size.leave_out and not before:
            pin(process.pid, pinned)
            before = processor_seconds(process.pid)
        if done >= size.steps and not after:
            after = processor_seconds(process.pid)
        time.sleep(0.02)  # the file and the processes say nothing by themselves
    return {name: after[name] - before.get(name, 0.0) for name in after}


def processor_seconds(parent: int) -> dict[str, float]:
    """Return the processor seconds so far of a process and its descendants, by what they work at."""
    total = dict.fromkeys(WORK.values(), 0.0)
    for process, work in processes(parent):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            times = process.cpu_times()
            total[work] += times.user + times.system
    return total


def pin(parent: int, pinned: Mapping[str, int]) -> None:
    """Give each kind of work its core."""
    for process, work in processes(parent):
        if work in pinned:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {pinned[work]})


def processes(parent: int) -> Iterator[tuple[psutil.Process, str]]:
    """Yield a process and its descendants with what they work at, one of WORK's values."""
    run = psutil.Process(parent)
    for process in (run, *run.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            # The program stands before its arguments, in which other services are named too.
            program = " ".join(process.cmdline()[:4])
            if "guard.py" not in program and (name := next((name for name in WORK if name in program), "")):
                yield process, WORK[name]


# --- What is shown ----------------------------------------------------------------------------------------------------


def mean_of(rounds: list[Round]) -> Round:
    figures = {
        each.name: statistics.mean(getattr(done, each.name) for done in rounds)
        for each in fields(Round)
        if each.name not in ("account", "parts")
    }
    account = {name: statistics.mean(done.account[name] for done in rounds) for name in rounds[0].account}
    return Round(**figures, account=account)


def shown(size: Size, side: str, done: Round) -> Round:
    """Print a round and return it."""
    print(
        f"{size.name:6} {side:21} {done.rate:6.1f} completions/s, {done.length:.1f} tokens each, "
        f"{done.zero_variance:.0%} of groups of equal rewards, reward at the end {done.reward:.2f}"
        + (f"; steps to {size.early}: {done.early_rate:.1f} completions/s" if size.early else ""),
        file=sys.stderr,
        flush=True,
    )
    return done


def print_account(size: Size, side: str, done: Round) -> None:
    """Print where a step's time goes."""
    lines = [f"  {name:52} {value:7.1f}" for name, value in done.account.items()]
    print(
        f"\n{size.name}, {side}: milliseconds of a step (and shares, counts)\n" + "\n".join(lines) + "\n",
        file=sys.stderr,
    )


def make_environment() -> None:
    """Make TRL's environment."""
    environments = str(ROOT / "deploy" / "local" / "environments.py")
    subprocess.run([sys.executable, environments, "bench-trl"], check=True, stdout=sys.stderr)


def write_model(size: str, folder: Path) -> Path:
    """Write a random model of a size of sizes.py; return the folder."""
    write = [ENVIRONMENTS / "rollout" / "bin" / "python", ROOT / "benchmarks" / "sizes.py", size, folder]
    subprocess.run([*map(str, write)], check=True, timeout=120, stdout=sys.stderr)
    return folder
