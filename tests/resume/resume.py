"""A run whose trainer is killed repeatedly: real trainer, broker and Redis, and a deterministic producer.

`train` executes a run and returns its results; the caller compares runs with and without kills.
"""

import fcntl
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from producer import COMPLETIONS, INVALID, Producer
from quartet.v1 import broker_pb2, broker_pb2_grpc
from safetensors.numpy import load_file

from quartet_common.checkpoints import newest_checkpoint
from quartet_common.ledger import LEDGER_FILE, read_ledger
from quartet_contract.world import instance

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "integration"))

from by_hand import ByHand  # noqa: E402
from preloaded import Pythons, make_models  # noqa: E402, F401
from started import REDIS_ANSWERS  # noqa: E402

RUN = "resume"
GROUPS_PER_STEP = 2
LOOK_SECONDS = 0.003
LIFE_SECONDS = 180.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL for the trainer once `step` steps are marked trained: after `delay`, or during a checkpoint.

        Attributes:
    step: of the run, according to the broker.
            delay: seconds after it.
    in_checkpoint: wait until the next checkpoint is being written, then `delay`.
    """

    step: int
    delay: float
    in_checkpoint: bool


def draw(seed: int, steps: int, kills: int) -> list[Kill]:
    """Return random kills, in order; every second one during a checkpoint."""
    chance = random.Random(seed)
    at = sorted(chance.randrange(0, steps - 1) for _ in range(kills))
    return [
        Kill(step, chance.uniform(0, 0.02 if n % 2 else 0.15), in_checkpoint=bool(n % 2)) for n, step in enumerate(at)
    ]


@dataclass(frozen=True)
class Restore:
    """At step `back_at` Redis is restored from its state at step `taken_at`; the trainer is not killed."""

    taken_at: int
    back_at: int


@dataclass(frozen=True)
class Drill:
    """At step `lost_at` trainer, Redis and newest checkpoint are lost; `quartet restore` puts back a live run's backup.

    Attributes:
        taken_at: the step of the backup.
        lost_at: a later step.
        redis: the server that the run is restored into, and its options.
    """

    taken_at: int
    lost_at: int
    redis: Sequence[str]


@dataclass
class Left:
    """The results of a run."""

    weights: dict[str, np.ndarray]
    ledger: list[tuple[int, list[str]]]
    metrics: list[dict]
    stats: broker_pb2.RunStats
    state: int
    audit: dict
    """The output of `quartet audit --json`."""
    killed: Counter
    """Kills by the trainer's activity."""
    log: str
    """Of all processes of the trainer."""

    def times(self) -> Counter:
        """Return how often each instance was trained."""
        return Counter(name for _, names in self.ledger for name in names)


class Deployment(ByHand):
    """Redis, a broker, and a trainer that is restarted, in a folder."""

    def __init__(self, folder: Path, pythons: Pythons, model: Path):
        folder.mkdir(parents=True)
        (folder / "run.toml").touch()
        settings = {
            "run.id": RUN,
            "run.folder": folder / "run",
            "server.metrics": "false",
            "model.path": model,
            "trainer.learning_rate": 3e-3,
            "trainer.tensorboard": "false",
            "trainer.checkpoint.interval": 1,
        }
        super().__init__(folder, folder / "run.toml", pythons, settings)
        self.checkpoints = folder / "run" / "checkpoints"
        self._snapshot = folder / "snapshot"
        self.start_redis()
        self.start("broker")
        self._channel = grpc.insecure_channel(self.addresses["broker"])
        self.stub = broker_pb2_grpc.BrokerServiceStub(self._channel)

    def make_run(self, steps: int, invalid: bool) -> None:
        """Create the run; submit the prompts of `steps` steps, and optionally that of an invalid group before them."""
        spec = broker_pb2.RunSpec(
            run_id=RUN, group_size=COMPLETIONS, groups_per_step=GROUPS_PER_STEP, max_staleness=0, max_steps=steps
        )
        spec.member_ttl.FromSeconds(600)
        spec.prompt_lease_ttl.FromSeconds(600)
        self.stub.CreateRun(broker_pb2.CreateRunRequest(spec=spec), timeout=60, wait_for_ready=True)
        names = [f"pass-0/{n}" for n in range(steps * GROUPS_PER_STEP)]
        if invalid:
            names.insert(0, INVALID)
        instances = [instance(name, f"{name}+1=?") for name in names]
        self.stub.SubmitPrompts(broker_pb2.SubmitPromptsRequest(run_id=RUN, instances=instances), timeout=60)
        self.stub.EndPrompts(broker_pb2.EndPromptsRequest(run_id=RUN), timeout=20)

    def run(self) -> broker_pb2.Run:
        """Return the run."""
        return self.stub.GetRun(broker_pb2.GetRunRequest(run_id=RUN), timeout=20).run

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition or the trainer's exit."""
        deadline = time.monotonic() + LIFE_SECONDS
        while not condition() and self.processes["trainer"].poll() is None:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(LOOK_SECONDS)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.run().policy_version >= step)

    def expect_end(self, status: int) -> None:
        """Wait for the trainer's exit."""
        ended = self.processes["trainer"].wait(LIFE_SECONDS)
        assert ended == status, f"a trainer ended with status {ended}, not {status}\n{self.logs()}"

    def end_trainer(self) -> None:
        """Kill the trainer by SIGKILL and wait for its exit."""
        self.processes["trainer"].kill()
        self.expect_end(-signal.SIGKILL)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with (self.checkpoints / ".lock").open("a") as lock:  # the killed process is a proxy of the one that holds it
            fcntl.flock(lock, fcntl.LOCK_EX)

    def kill(self, kill: Kill, last: int) -> str:
        """Kill the trainer, which cannot finish before the step `last`; return its activity."""
        self.until_step(kill.step)
        if kill.in_checkpoint:
            last_one = self.checkpoints / f"step-{last:08d}"
            self.until(lambda: self._being_written() or last_one.exists())
        time.sleep(kill.delay)
        doing = "in mid-checkpoint" if self._being_written() else "between checkpoints"
        self.end_trainer()
        return doing

    def _being_written(self) -> bool:
        return any(self.checkpoints.glob(".writing-*"))

    def restore(self, restore: Restore) -> None:
        """Restore Redis while the trainer runs; the trainer exits because of it."""
        self.until_step(restore.taken_at)
        self.processes["redis"].send_signal(signal.SIGSTOP)
        shutil.copytree(self.redis_data, self._snapshot)
        self.processes["redis"].send_signal(signal.SIGCONT)
        self.until_step(restore.back_at)
        self._lose_redis()
        self._snapshot.rename(self.redis_data)
        self.start_redis()
        self.expect_end(1)

    def drill(self, drill: Drill) -> None:
        """Follow docs/backup.md with a run that goes on."""
        self.until_step(drill.taken_at)
        self.quartet("backup", "backup")
        self.until_step(drill.lost_at)
        self.end_trainer()
        newest, _ = newest_checkpoint(self.checkpoints)
        shutil.rmtree(newest)
        self._lose_redis()
        self.redis_data.mkdir()
        self._start("redis", [*drill.redis, "--port", str(self.redis_port), "--dir", str(self.redis_data)])
        self.wait_for("redis", REDIS_ANSWERS)
        self.quartet("restore", "backup")

    def quartet(self, command: str, name: str) -> None:
        """Run `quartet backup` or `restore` with a folder beside the run's."""
        run_file, *overrides = self.arguments
        words = [sys.executable, "-m", "quartet_client", command, self.folder / name, "--config", run_file, *overrides]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def _lose_redis(self) -> None:
        self.stop("redis", signal.SIGKILL)
        shutil.rmtree(self.redis_data)

    def left(self, killed: Counter) -> Left:
        """Return the results."""
        run, folder = self.run(), self.folder / "run"
        _, manifest = newest_checkpoint(self.checkpoints)
        audit = [sys.executable, "-m", "quartet_client", "audit", RUN, "--broker", self.addresses["broker"], "--json"]
        told = subprocess.run([*audit, "--checkpoints", self.checkpoints], capture_output=True, text=True, timeout=60)
        return Left(
            weights=load_file(folder / "model" / "model.safetensors"),
            ledger=read_ledger(self.checkpoints / LEDGER_FILE, manifest["ledger"]),
            metrics=self.rows("step"),
            stats=run.stats,
            state=run.state,
            audit=json.loads(told.stdout),
            killed=killed,
            log=self.log("trainer"),
        )

    def close(self) -> None:
        """Stop all processes."""
        self._channel.close()
        super().close()


def train(
    folder: Path,
    pythons: Pythons,
    model: Path,
    steps: int,
    kills: Iterable[Kill] = (),
    restore: Restore | Drill | None = None,
    invalid: bool = False,
) -> Left:
    """Execute a run of `steps` steps in `folder`, with kills of its trainer or a restore.

    `invalid`: add a group that cannot be trained.
    """
    killed: Counter = Counter()
    with ExitStack() as stack:
        deployment = stack.enter_context(closing(Deployment(folder, pythons, model)))
        deployment.make_run(steps, invalid)
        producer = stack.enter_context(closing(Producer(deployment.stub, RUN, last=steps - 1)))
        producer.start()
        if restore is not None:
            deployment.start("trainer")
            if isinstance(restore, Drill):
                deployment.drill(restore)
            else:
                deployment.restore(restore)
        for kill in kills:
            deployment.start("trainer")
            killed[deployment.kill(kill, steps - 1)] += 1
        deployment.start("trainer")
        producer.finish()
        deployment.expect_end(0)
        producer.close()
        assert producer.failure is None, f"the producer failed: {producer.failure}"
        return deployment.left(killed)


def difference(one: Left, other: Left) -> float:
    """Return the largest difference of any weight."""
    assert one.weights.keys() == other.weights.keys()
    return max(float(np.abs(one.weights[name] - other.weights[name]).max()) for name in one.weights)


def wrong(left: Left, steps: int) -> list[str]:
    """Return the faults of a run of `steps` steps, a sentence each."""
    wanted = [f"pass-0/{n}" for n in range(steps * GROUPS_PER_STEP)]
    times, found = left.times(), []
    found += [f"'{name}' was trained {times[name]} times" for name in wanted if times[name] != 1]
    found += [f"'{name}' was trained and never submitted" for name in times.keys() - set(wanted)]
    if left.state != broker_pb2.RUN_STATE_SUCCEEDED:
        found.append(f"the run is {broker_pb2.RunState.Name(left.state)}")
    if left.stats.committed != len(wanted):
        found.append(f"{left.stats.committed} groups are committed, not {len(wanted)}")
    if not left.audit["ok"] or left.audit["exactly_once"] != len(wanted):
        found.append(f"the audit says {left.audit}")
    if [line["step"] for line in left.metrics] != list(range(steps)):
        found.append("metrics.jsonl has not every step once")
    return found


def summary(killed: Left, unkilled: Left, steps: int) -> tuple[bool, str]:
    """Return whether there is no fault, and a line of text."""
    faults = wrong(killed, steps) + wrong(unkilled, steps)
    apart = difference(killed, unkilled)
    what = ", ".join(f"{count} {name}" for name, count in sorted(killed.killed.items()))
    line = (
        f"resume     {steps} steps, {killed.killed.total()} kills ({what}): "
        f"{sum(times == 1 for times in killed.times().values())} groups exactly once; "
        f"final weights apart by at most {apart:.2g}"
    )
    return not faults and apart <= 1e-5, "\n".join([line, *faults])
