"""A run whose trainer is killed again and again: real trainer, real broker, Redis, and a deterministic producer.

`train` plays one run to its end and returns what it left; the killed and the unkilled one are compared by the caller.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from producer import COMPLETIONS, INVALID, Producer
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2
from safetensors.numpy import load_file

from quartet_common.ledger import LEDGER_FILE, read_ledger
from quartet_common.ports import free_ports
from quartet_local.redis import find_server

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
RUN = "resume"
GROUPS_PER_STEP = 2
LOOK_SECONDS = 0.003
LIFE_SECONDS = 180.0
START_SECONDS = 180.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL for the trainer once `step` steps are marked trained: after `delay`, or in the midst of a checkpoint.

    Attributes:
        step: of the run, as the broker counts.
        delay: seconds after it.
        in_checkpoint: wait for the next checkpoint being written, then `delay`.
    """

    step: int
    delay: float
    in_checkpoint: bool


def draw(seed: int, steps: int, kills: int) -> list[Kill]:
    """Random moments, in order; every second one in mid-checkpoint."""
    chance = random.Random(seed)
    at = sorted(chance.randrange(0, steps - 1) for _ in range(kills))
    return [
        Kill(step, chance.uniform(0, 0.02 if n % 2 else 0.15), in_checkpoint=bool(n % 2)) for n, step in enumerate(at)
    ]


@dataclass
class Left:
    """What a run left behind."""

    weights: dict[str, np.ndarray]
    ledger: list[tuple[int, list[str]]]
    metrics: list[dict]
    stats: broker_pb2.RunStats
    state: int
    audit: dict
    """What `quartet audit --json` says."""
    dropped: dict[str, str]
    """Why, of the invalid instances of the run."""
    lives: int = 0
    killed: Counter = field(default_factory=Counter)
    """Kills by what the trainer was doing."""

    def times(self) -> Counter:
        """How often each instance is in the weights."""
        return Counter(name for _, names in self.ledger for name in names)


class Trainers:
    """The process that trainers are forked from; see trainers.py."""

    def __init__(self, folder: Path):
        self.model, self.log = folder / "model", folder / "trainer.log"
        environment = {
            **os.environ,
            "TRAINER_LOG": str(self.log),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        command = [str(ENVIRONMENTS / "trainer/bin/python"), str(Path(__file__).with_name("trainers.py"))]
        self._process = subprocess.Popen(
            [*command, str(self.model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._event()["event"] == "ready"

    def start(self, arguments: list[str]) -> int:
        """Start a life; returns its pid."""
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return self._event()["pid"]

    def wait(self) -> int:
        """Wait for the life to end; returns its exit status, minus the signal's number if it was killed."""
        return self._event()["status"]

    def _event(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that starts trainers has ended; the trainers' log is {self.log}")
        return json.loads(line)

    def close(self) -> None:
        """End it; the life under way, if any, was ended by whoever began it."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Town:
    """Redis and broker over a folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self._processes: list[subprocess.Popen] = []
        redis, broker = free_ports(2)
        self.address = f"127.0.0.1:{broker}"
        self._log = (folder / "services.log").open("ab")
        self._data, self._snapshot = folder / "redis", folder / "snapshot"
        self._data.mkdir()
        options = {"bind": "127.0.0.1", "port": str(redis), "dir": str(self._data), "appendonly": "yes", "save": ""}
        self._redis_command = [find_server(), *(word for key, value in options.items() for word in (f"--{key}", value))]
        self._redis = self._start(self._redis_command)
        settings = {
            "run.id": RUN,
            "run.folder": folder / "run",
            "addresses.broker": self.address,
            "broker.redis_url": f"redis://127.0.0.1:{redis}/0",
            "server.metrics": "false",
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self._start([str(ENVIRONMENTS / "broker/bin/python"), "-m", "quartet_broker", *words])
        self._channel = grpc.insecure_channel(self.address)
        self.stub = broker_pb2_grpc.BrokerServiceStub(self._channel)

    def _start(self, command: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def take_snapshot(self) -> None:
        """Copy Redis' data as they are."""
        self._redis.send_signal(signal.SIGSTOP)
        shutil.copytree(self._data, self._snapshot)
        self._redis.send_signal(signal.SIGCONT)

    def restore_snapshot(self) -> None:
        """Have Redis go on from the snapshot."""
        self._redis.kill()
        self._redis.wait()
        shutil.rmtree(self._data)
        self._snapshot.rename(self._data)
        self._redis = self._start(self._redis_command)

    def make_run(self, steps: int, invalid: bool) -> None:
        """Make the run and submit exactly the prompts of `steps` steps; with `invalid`, those of INVALID among them."""
        spec = broker_pb2.RunSpec(
            run_id=RUN, group_size=COMPLETIONS, groups_per_step=GROUPS_PER_STEP, max_staleness=0, max_steps=steps
        )
        spec.member_ttl.FromSeconds(600)
        spec.prompt_lease_ttl.FromSeconds(600)
        self.stub.CreateRun(broker_pb2.CreateRunRequest(spec=spec), timeout=60, wait_for_ready=True)
        names = [f"pass-0/{n}" for n in range(steps * GROUPS_PER_STEP)]
        if invalid:
            for place, name in enumerate(INVALID):
                names.insert(3 * place, name)
        instances = [
            experience_pb2.PromptInstance(
                instance_id=name,
                purpose=experience_pb2.PURPOSE_TRAIN,
                prompt=experience_pb2.Prompt(prompt_id=name, text=f"{name}+1=?"),
            )
            for name in names
        ]
        self.stub.SubmitPrompts(broker_pb2.SubmitPromptsRequest(run_id=RUN, instances=instances), timeout=60)
        self.stub.EndPrompts(broker_pb2.EndPromptsRequest(run_id=RUN), timeout=20)

    def run(self) -> broker_pb2.Run:
        """The run as it stands."""
        return self.stub.GetRun(broker_pb2.GetRunRequest(run_id=RUN), timeout=20).run

    def why_dropped(self, instance_id: str) -> str:
        """What the trainer said of a group that it dropped."""
        request = broker_pb2.GetGroupRequest(run_id=RUN, instance_id=instance_id)
        return self.stub.GetGroup(request, timeout=20).moments[-1].reason

    def close(self) -> None:
        """End what was started."""
        self._channel.close()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


@dataclass(frozen=True)
class Restore:
    """Redis goes on at `back_at` from its state at `taken_at`, both steps that are trained; the trainer lives.

    Attributes:
        all: the checkpoints and the ledger are put back too, copied after Redis; the trainer is killed before.
    """

    taken_at: int
    back_at: int
    all: bool = False


def train(
    folder: Path,
    trainers: Trainers,
    steps: int,
    kills: list[Kill],
    checkpoint_every: int = 1,
    restore: Restore | None = None,
    invalid: bool = False,
) -> Left:
    """Play a run of `steps` steps in `folder`, killing its trainer at `kills`, or restoring its Redis.

    `invalid`: some groups, besides those of the steps, cannot be trained.
    """
    town = Town(folder)
    killed: Counter = Counter()
    try:
        town.make_run(steps, invalid)
        producer = Producer(town.stub, RUN)
        producer.start()
        settings = {
            "run.id": RUN,
            "run.folder": folder / "run",
            "addresses.broker": town.address,
            "addresses.trainer": "127.0.0.1:0",
            "server.metrics": "false",
            "model.path": trainers.model,
            "trainer.learning_rate": 3e-3,
            "trainer.tensorboard": "false",
            "trainer.checkpoint.interval": checkpoint_every,
        }
        arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        lives = 0
        if restore is not None:
            lives = 1
            _live_through(town, trainers, arguments, folder, restore)
        for kill in [*kills, None]:
            lives += 1
            pid = trainers.start(arguments)
            timer = threading.Timer(LIFE_SECONDS, os.killpg, (pid, signal.SIGKILL))
            timer.start()
            try:
                if kill is not None:
                    killed[_kill(town, folder / "run" / "checkpoints", pid, kill)] += 1
                status = trainers.wait()
            finally:
                timer.cancel()
            if kill is None and status != 0:
                raise RuntimeError(f"the last trainer ended with status {status}; its log is {trainers.log}")
            if kill is not None and status != -signal.SIGKILL:
                raise RuntimeError(f"a trainer ended with status {status} before it was killed; see {trainers.log}")
        producer.close()
        if producer.failure is not None:
            raise RuntimeError(f"the producer failed: {producer.failure}")
        return _left(town, folder / "run", lives, killed, INVALID if invalid else ())
    finally:
        town.close()


def _live_through(town: Town, trainers: Trainers, arguments: list[str], folder: Path, restore: Restore) -> None:
    """Live one life of the trainer, in which Redis is put back."""
    checkpoints, copy = folder / "run" / "checkpoints", folder / "copy"
    pid = trainers.start(arguments)
    timer = threading.Timer(LIFE_SECONDS, os.killpg, (pid, signal.SIGKILL))
    timer.start()
    try:
        _until_step(town, restore.taken_at)
        town.take_snapshot()
        if restore.all:  # docs/backup.md: after Redis, the ledger last
            copy.mkdir()
            for path in sorted(checkpoints.glob("step-*")):
                subprocess.run(["cp", "-r", path, copy], check=False)  # it may be removed meanwhile
            shutil.copy(checkpoints / LEDGER_FILE, copy)
        _until_step(town, restore.back_at)
        if restore.all:
            os.killpg(pid, signal.SIGKILL)
            trainers.wait()
            shutil.rmtree(checkpoints)
            copy.rename(checkpoints)
            town.restore_snapshot()
            return
        town.restore_snapshot()
        status = trainers.wait()
        if status != 1:
            raise RuntimeError(f"the trainer beside a restored Redis ended with status {status}; see {trainers.log}")
    finally:
        timer.cancel()


def _kill(town: Town, checkpoints: Path, pid: int, kill: Kill) -> str:
    """Kill at the moment given; returns what the trainer was doing."""
    deadline = time.monotonic() + LIFE_SECONDS
    _until_step(town, kill.step)
    if kill.in_checkpoint:
        while not _being_written(checkpoints) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
    time.sleep(kill.delay)
    doing = "in mid-checkpoint" if _being_written(checkpoints) else "between checkpoints"
    os.killpg(pid, signal.SIGKILL)
    return doing


def _until_step(town: Town, step: int) -> None:
    deadline = time.monotonic() + LIFE_SECONDS
    while town.run().policy_version < step and time.monotonic() < deadline:
        time.sleep(0.01)


def _being_written(checkpoints: Path) -> bool:
    return checkpoints.is_dir() and any(path.name.startswith(".writing-") for path in checkpoints.iterdir())


def _left(town: Town, folder: Path, lives: int, killed: Counter, invalid: Iterable[str]) -> Left:
    run = town.run()
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
    audit = [sys.executable, "-m", "quartet_client", "audit", RUN, "--broker", town.address, "--json"]
    told = subprocess.run([*audit, "--checkpoints", folder / "checkpoints"], capture_output=True, text=True, timeout=60)
    return Left(
        audit=json.loads(told.stdout),
        dropped={name: town.why_dropped(name) for name in invalid},
        weights=load_file(folder / "model" / "model.safetensors"),
        ledger=read_ledger(folder / "checkpoints" / LEDGER_FILE, manifest["ledger"]),
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()],
        stats=run.stats,
        state=run.state,
        lives=lives,
        killed=killed,
    )


def difference(one: Left, other: Left) -> float:
    """The largest difference of any weight."""
    assert one.weights.keys() == other.weights.keys()
    return max(float(np.abs(one.weights[name] - other.weights[name]).max()) for name in one.weights)


def wrong(left: Left, steps: int) -> list[str]:
    """What is wrong with a run of `steps` steps, in sentences."""
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
    if [line["step"] for line in left.metrics if line["kind"] == "step"] != list(range(steps)):
        found.append("metrics.jsonl has not every step once")
    return found


def main_summary(killed: Left, unkilled: Left, steps: int) -> tuple[bool, str]:
    """Whether all is right, and a line that says it."""
    faults = wrong(killed, steps) + wrong(unkilled, steps)
    apart = difference(killed, unkilled)
    what = ", ".join(f"{count} {name}" for name, count in sorted(killed.killed.items()))
    line = (
        f"resume     {steps} steps, {sum(killed.killed.values())} kills ({what}), {killed.lives} lives: "
        f"{sum(times == 1 for times in killed.times().values())} groups exactly once; "
        f"final weights apart by at most {apart:.2g}"
    )
    return not faults and apart <= 1e-5, "\n".join([line, *faults])


def tell(text: str) -> None:
    """Print at once."""
    print(text, flush=True, file=sys.stdout)
