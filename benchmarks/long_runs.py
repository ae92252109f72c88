"""A run of 20,000 steps: memory, files and time of a step against those at step 2,000; and how long a resume takes.

Broker, Redis and trainer are real, with checkpoints every 100 steps, ledger, events, samples, metrics.jsonl and
TensorBoard as by default; the learner is a stand-in (`long_runs_trainer.py`), so a step costs what surrounds the
learning. A rollout without a model (`long_runs_rollout.py`) puts two groups of 8 short completions for each step. What
the broker remembers of settled groups, results and events is limited to what is reached before step 2,000.

- Memory: RSS of the trainer and of the broker, `used_memory` of Redis as in `scale.py`.
- Files: descriptors of the trainer and of the broker, and the files in the run's folder.
- Step, over the last 2,000 steps against those from 2,000 to 4,000: the median of the intervals between steps in
  metrics.jsonl; and the CPU time of trainer, broker and Redis, which other work on the machine delays less.
- Resume: the trainer is killed and started again; the seconds from the end of its imports, which take seconds
  however long the run is, to its first step; the median of several, after 20,000 steps against after 100.
"""

import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import redis
from broker_load import CALL_SECONDS, create_run, submit
from broker_processes import cpu_seconds, listener, redis_server
from measuring import ENVIRONMENTS, Figure, process, report, service
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc
from safetensors.numpy import save_file
from scale import memory_of

from quartet_common.channel import connect_sync
from quartet_common.ports import free_port

ROLLOUT, TRAINER = (Path(__file__).with_name(f"long_runs_{side}.py") for side in ("rollout", "trainer"))
RUN = "long"
STEPS, EARLY, FEW = 20_000, 2000, 100
NAME, AFTER = "long_runs", f"after {EARLY:,}"
GROUPS_PER_STEP = 2
RESUMES = 3
AHEAD = 1000  # steps whose prompts are queued
KEPT = ["broker.remembered_instances=2000", "broker.remembered_lives=500", "broker.max_event_bytes=1048576"]
KEPT += ["broker.max_result_bytes=1048576"]
LOOK_SECONDS = 0.1
STALLED_SECONDS = 60.0


class LongRun:
    """The run, its trainer and what is seen of them."""

    def __init__(self, folder: Path, broker: str, client: redis.Redis, server: psutil.Process, channel: grpc.Channel):
        self._folder, self._address, self._client, self._redis = folder, broker, client, server
        self._stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._queued = 0
        self._broker, self._trainer = listener(broker), psutil.Process()
        self.run, self.log = folder / "run", folder / "trainer.log"
        save_file({"w": np.zeros(1, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        self._submit()

    @contextlib.contextmanager
    def trainer(self) -> Iterator[None]:
        """Run the trainer, from its first step on; it is killed at the end."""
        settings = [f"run.id={RUN}", f"run.folder={self.run}", "server.metrics=false", f"model.path={self._folder}"]
        settings += [f"addresses.broker={self._address}", f"addresses.trainer=127.0.0.1:{free_port()}"]
        command = [str(ENVIRONMENTS / "trainer" / "bin" / "python"), str(TRAINER)]
        command += [word for each in settings for word in ("--set", each)]
        self.log.unlink(missing_ok=True)
        with process(command, self.log, cwd=self._folder) as guard:
            deadline = time.monotonic() + STALLED_SECONDS
            while "step done" not in self.log.read_text():
                if guard.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the trainer does not train: {self.log.read_text()[-2000:]}")
                time.sleep(LOOK_SECONDS)
            (self._trainer,) = psutil.Process(guard.pid).children()
            yield
            self._trainer.kill()

    def resume(self) -> float:
        """Start and kill the trainer; return the seconds from its learner's creation to its first step."""
        with self.trainer():
            created = float(re.search(r"created at (.+)", self.log.read_text())[1])
            resumed = int(re.search(r"resuming from checkpoint step=(\d+)", self.log.read_text())[1])
            return next(at for step, at in self.steps() if step == resumed) - created

    def steps(self) -> Iterator[tuple[int, float]]:
        """Yield the steps in metrics.jsonl and when each was done."""
        with (self.run / "metrics.jsonl").open() as file:
            for line in file:
                with contextlib.suppress(ValueError):  # it is being written, or was when the trainer was killed
                    row = json.loads(line)
                    yield row["step"], row["time"]

    def until(self, step: int) -> None:
        """Queue prompts until so many steps are trained."""
        moved, before = time.monotonic(), -1
        while (now := self._step()) < step:
            if now > before:
                moved, before = time.monotonic(), now
            if time.monotonic() > moved + STALLED_SECONDS:
                raise RuntimeError(f"no step after {now}: {self.log.read_text()[-2000:]}")
            if self._queued < now + AHEAD:
                self._submit()
            time.sleep(LOOK_SECONDS)

    def until_checkpoint(self, step: int) -> None:
        """Wait until the checkpoint of a step that is trained is complete."""
        deadline = time.monotonic() + STALLED_SECONDS
        while not (self.run / "checkpoints" / f"step-{step:08}").is_dir():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no checkpoint of step {step}: {self.log.read_text()[-2000:]}")
            time.sleep(LOOK_SECONDS)

    def _submit(self) -> None:
        submit(self._address, RUN, f"after-{self._queued}", AHEAD * GROUPS_PER_STEP)
        self._queued += AHEAD

    def _step(self) -> int:
        return self._stub.GetRun(pb.GetRunRequest(run_id=RUN), timeout=CALL_SECONDS).run.policy_version

    def cpu(self) -> float:
        """Return the seconds of CPU of the trainer, the broker and Redis so far."""
        return sum(map(cpu_seconds, (self._trainer, self._broker, self._redis)))

    def held(self) -> dict[str, float]:
        """Return what the run holds now, by the name of a figure."""
        processes = {"the trainer": self._trainer, "the broker": self._broker}
        return {
            "memory of Redis": memory_of(self._client) / 1e6,
            **{f"memory of {name}": each.memory_info().rss / 1e6 for name, each in processes.items()},
            **{f"descriptors of {name}": each.num_fds() for name, each in processes.items()},
            "files in the run's folder": sum(len(files) for _, _, files in os.walk(self.run)),
        }


def figures(held: list[dict[str, float]], cpu: list[float], at: list[float]) -> list[Figure]:
    """`held`, `cpu`: after each EARLY steps. `at`: when each step was done."""
    found = []
    for name, late in held[-1].items():
        unit = "MB" if name.startswith("memory") else "files"
        found.append(Figure(f"{NAME}: {name} after {STEPS:,} steps", unit, late, held[0][name], AFTER, "lower"))
    intervals = np.diff(at) * 1000
    pair = [float(np.median(each)) for each in (intervals[-EARLY:], intervals[EARLY : 2 * EARLY])]
    found.append(Figure(f"{NAME}: a step, the last {EARLY:,} of {STEPS:,}", "ms", *pair, AFTER, "lower"))
    pair = [1000 * (cpu[n] - cpu[n - 1]) / EARLY for n in (-1, 1)]
    return [*found, Figure(f"{NAME}: CPU of such a step", "ms", *pair, AFTER, "lower")]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, server = stack.enter_context(redis_server(folder))
        address = stack.enter_context(service("broker", folder, [f"broker.redis_url={url}", *KEPT]))
        client = stack.enter_context(redis.Redis.from_url(url))
        create_run(address, RUN, GROUPS_PER_STEP, max_staleness=8)
        run = LongRun(folder, address, client, server, stack.enter_context(connect_sync(address)))
        stack.enter_context(process([sys.executable, str(ROLLOUT), address, RUN], folder / "rollout.log"))
        held, cpu = [], []
        with run.trainer():
            run.until(FEW)
            run.until_checkpoint(FEW)
        few = [run.resume() for _ in range(RESUMES)]
        with run.trainer():
            for step in range(EARLY, STEPS + 1, EARLY):
                run.until(step)
                held.append(run.held())
                cpu.append(run.cpu())
                log(f"step {step}: {cpu[-1]:.1f} s of CPU, {held[-1]}")
            at = [done for _, done in run.steps()]
        many = [run.resume() for _ in range(RESUMES)]
    log(f"seconds of a resume: {few} after {FEW} steps, {many} after {STEPS}")
    pair = statistics.median(many), statistics.median(few)
    resume = Figure(f"{NAME}: resume after {STEPS:,} steps", "s", *pair, f"after {FEW}", "lower")
    report(*figures(held, cpu, at), resume)


if __name__ == "__main__":
    main()
