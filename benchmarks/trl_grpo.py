"""GRPO end to end: the four services beside TRL's `GRPOTrainer`, completions trained per second of wall time.

Both train the same model on the same problems with the same reward: 16 prompts × 8 completions a step, at most 32 new
tokens, temperature 1, AdamW at the same rate, clip 0.2 / 0.28, token mean, no KL, float32, one optimizer step a batch.
Groups whose rewards are all equal have no gradient: ours skips their forward and backward pass, TRL computes it.

- Ours: broker, Redis, reward service, rollout and trainer as processes, `max_staleness = 1`: the rollout generates the
  next batch during training; with the tiny model also 2, so that it does not wait for weights. One thread in each
  process, but two in the trainer of the larger model, which has more work than the rollout. With the transformers
  engine; results with vLLM are shown as well.
- TRL: one process in its own environment (`bench-trl`), generating with transformers, with one and with two threads. On
  a CPU it generates and trains in turn. The faster of the two counts.

Rates are measured from the end of an early step to the end of the last one, without start, evaluations and checkpoints,
which neither makes. Two models: the demo's, warmed up, with 0.3 M parameters, over the demo's 110 steps and over the
first 40 of them; and an untrained one of 30 M with 4 prompts per step and up to 64 new tokens. That one gets no reward,
so ours is configured to skip nothing. Sides run in turn, ours, TRL's, ours, TRL's; a figure is the mean of two.

It also prints the parts of a step's time, by the trainer's metrics and the processor time of each process. The
processor time of a step is a figure too, because it bounds the rates.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
from measuring import ENVIRONMENTS, ROOT, Figure, report

MODEL_DATA = ROOT / ".quartet" / "arithmetic"
RUN_FILE = ROOT / "examples" / "arithmetic" / "run.toml"
COMPLETIONS = 8
ROUNDS = 2
LAST_STEPS = 20
LEARNING_RATE = 3e-4
SIDE_SECONDS = 300.0  # twenty times what a quiet machine needs
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
    """A model, and how long its rounds are."""

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
    early: int = 0
    """Steps after which a rate is taken too."""


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


# --- The sides --------------------------------------------------------------------------------------------------------


def trl(size: Size, threads: int) -> Round:
    """Train with TRL. Raises RuntimeError if it fails."""
    options = {
        "steps": size.steps,
        "prompts": size.prompts,
        "completions": COMPLETIONS,
        "new_tokens": size.new_tokens,
        "learning_rate": LEARNING_RATE,
        "threads": threads,
    }
    python = ENVIRONMENTS / "bench-trl" / "bin" / "python"
    command = [python, ROOT / "benchmarks" / "trl_side.py", size.model, MODEL_DATA / "train.jsonl", json.dumps(options)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    try:
        done = subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=SIDE_SECONDS
        )
    except subprocess.TimeoutExpired:
        hint = "where other work runs, its threads wait for each other: use a quiet machine"
        raise RuntimeError(f"TRL with {threads} threads is not done after {SIDE_SECONDS:.0f} s; {hint}") from None
    if done.returncode:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    record = json.loads(done.stdout.splitlines()[-1])
    ends, cpu, first = record["ends"], record["cpu"], size.leave_out
    count, seconds = len(ends) - first, ends[-1] - ends[first - 1]
    return Round(
        rate=size.prompts * COMPLETIONS * count / seconds,
        length=statistics.mean(record["length"][first:]),
        zero_variance=statistics.mean(record["zero_variance"][first:]),
        reward=statistics.mean(record["reward"][-LAST_STEPS:]),
        account={
            "step": 1000 * seconds / count,
            "processor, all of it": 1000 * (cpu[-1] - cpu[first - 1]) / count,
        },
        early_rate=early_rate(size, ends),
    )


def ours(size: Size, engine: str, staleness: int = 1) -> Round:
    """Train with the four services. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        settings = {
            "run.id": "peer",
            "run.folder": folder,
            "run.max_steps": size.steps,
            "run.max_staleness": staleness,
            "run.groups_per_step": size.prompts,
            "run.sampling.max_new_tokens": size.new_tokens,
            "model.path": size.model,
            "data.train": MODEL_DATA / "train.jsonl",
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
        }
        command = [str(ENVIRONMENTS / "client" / "bin" / "quartet"), "run", str(RUN_FILE), "--plain"]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (Path(temporary) / "output.log").open("w+") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
            try:
                used = watch(process, folder / "metrics.jsonl", size)
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
    )


def early_rate(size: Size, ends: list[float]) -> float:
    """Return the completions per second of the measured ones of the first `early` steps, by the steps' ends."""
    if not size.early:
        return 0.0
    seconds = ends[size.early - 1] - ends[size.leave_out - 1]
    return size.prompts * COMPLETIONS * (size.early - size.leave_out) / seconds


# --- What the processes of a run use ----------------------------------------------------------------------------------


def watch(process: subprocess.Popen, metrics: Path, size: Size) -> dict[str, float]:
    """Wait for the run's end; return the processor seconds of each service over the measured steps.

    Raises RuntimeError if the run is not over in time.
    """
    deadline = time.monotonic() + SIDE_SECONDS
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run is not over after {SIDE_SECONDS:.0f} s")
        done = metrics.read_text().count('"kind": "step"') if metrics.exists() else 0
        if done >= size.leave_out and not before:
            before = processor_seconds(process.pid)
        if done >= size.steps and not after:
            after = processor_seconds(process.pid)
        time.sleep(0.02)  # the file and the processes say nothing by themselves
    return {name: after[name] - before.get(name, 0.0) for name in after}


def processor_seconds(parent: int) -> dict[str, float]:
    """Return the processor seconds so far of a process and its descendants, by what they work at."""
    total = dict.fromkeys(WORK.values(), 0.0)
    run = psutil.Process(parent)
    for process in (run, *run.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            # The program stands before its arguments, in which other services are named too.
            program = " ".join(process.cmdline()[:4])
            if "guard.py" not in program and (name := next((name for name in WORK if name in program), "")):
                times = process.cpu_times()
                total[WORK[name]] += times.user + times.system
    return total


# --- The whole --------------------------------------------------------------------------------------------------------


def compare(size: Size, *, staler: bool = False) -> tuple[Round, ...]:
    """Return ours, TRL's, and if it is wanted ours with max_staleness 2; each the mean of its rounds, printed too."""
    rounds: dict[str, list[Round]] = {"ours": [], "TRL": [], "staler": []}
    for _ in range(ROUNDS):
        rounds["ours"].append(shown(size, "ours, transformers", ours(size, "transformers")))
        rounds["TRL"].append(shown(size, "TRL, 2 threads", trl(size, 2)))
        if staler:
            rounds["staler"].append(shown(size, "ours, max_staleness 2", ours(size, "transformers", staleness=2)))
    return tuple(mean_of(done) for done in rounds.values() if done)


def mean_of(rounds: list[Round]) -> Round:
    figures = {
        each.name: statistics.mean(getattr(done, each.name) for done in rounds)
        for each in fields(Round)
        if each.name != "account"
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


def main() -> None:
    prepare = [ENVIRONMENTS / "trainer" / "bin" / "python", ROOT / "examples/arithmetic/prepare.py", MODEL_DATA]
    subprocess.run([*map(str, prepare)], check=True, timeout=300, stdout=sys.stderr)
    environments = str(ROOT / "deploy" / "local" / "environments.py")
    subprocess.run([sys.executable, environments, "bench-trl"], check=True, stdout=sys.stderr)
    figures = []

    def compared(size: Size, engine: str, done: Round, peer_name: str, peer: Round) -> Figure:
        name = f"trl_grpo: {size.name}, {engine} engine"
        return Figure(name, "completions/s", done.rate, peer.rate, peer_name, "higher")

    tiny = Size("0.3 M", MODEL_DATA / "model", 16, 32, 110, 8, skip_zero_advantage=True, trainer_threads=1, early=40)
    mine, theirs, staler = compare(tiny, staler=True)
    single = shown(tiny, "TRL, 1 thread", trl(tiny, 1))
    best, name = max(((theirs, "TRL GRPOTrainer, 2 threads"), (single, "TRL GRPOTrainer, 1 thread")), key=rate)
    figures.append(compared(tiny, "transformers", mine, name, best))
    two = "trl_grpo: 0.3 M, transformers engine, max_staleness 2"
    figures.append(Figure(two, "completions/s", staler.rate, best.rate, name, "higher"))
    early = "trl_grpo: 0.3 M, transformers engine, steps 9 to 40"
    figures.append(Figure(early, "completions/s", mine.early_rate, best.early_rate, name, "higher"))
    # What completions per second are bounded by, where all cores are busy all the time.
    cost, used = "trl_grpo: 0.3 M, transformers engine, processor time of a step", "processor, all of it"
    figures.append(Figure(cost, "ms", mine.account[used], best.account[used], name, "lower"))
    figures.append(compared(tiny, "vllm", shown(tiny, "ours, vLLM", ours(tiny, "vllm")), name, best))
    print_account(tiny, "ours", mine)
    print_account(tiny, "ours, max_staleness 2", staler)
    print_account(tiny, name, best)
    with tempfile.TemporaryDirectory() as folder:
        write = [ENVIRONMENTS / "rollout" / "bin" / "python", ROOT / "benchmarks" / "sizes.py", "30 M", folder]
        subprocess.run([*map(str, write)], check=True, timeout=120, stdout=sys.stderr)
        big = Size("30 M", Path(folder), 4, 64, 7, 2, skip_zero_advantage=False, trainer_threads=2)
        mine, theirs = compare(big)
        figures.append(compared(big, "transformers", mine, "TRL GRPOTrainer, 2 threads", theirs))
        print_account(big, "ours", mine)
        print_account(big, "TRL", theirs)
    report(*figures)


def rate(pair: tuple[Round, str]) -> float:
    return pair[0].rate


if __name__ == "__main__":
    main()
