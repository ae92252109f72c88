"""What runs of sizes that no laptop has would do: 7B on 8 and 64 H100s, 70B on 256, by a simulation of discrete events.

    .quartet/envs/dev/bin/python benchmarks/simulate.py [--table]

It simulates rollouts that generate groups token by token within a KV cache, the broker's admission limit
(docs/broker.md), a trainer that takes a batch as soon as there is one, and weight updates. Every constant has its
source below. The simulation is then compared with a real run on this machine: the durations of generation and training
and a step's processor time are measured with `max_staleness = 0`, where the phases alternate; from these the step time
with `max_staleness = 1` is predicted, and compared with a measurement. `--table` only prints the table.
"""

import argparse
import heapq
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import count

from measuring import ENVIRONMENTS, ROOT, Figure, report
from trl_grpo import MODEL_DATA, Round, Size, ours

DEMO = Size("0.3 M", MODEL_DATA / "model", 16, 32, 60, 10, skip_zero_advantage=True, trainer_threads=1)
GIGA = 10**9
CHUNK_TOKENS = 64  # generated between two looks at a rollout
EXPERIENCE_BYTES = 13  # of a token at the broker: id, log-prob, mask, version, with room (measured: a group of 1 MB)
STEPS, LEFT_OUT = 12, 4
GROUP_SIZE = 8
PREPARE_SECONDS = 300.0
_NOTHING = 1e-6


@dataclass(frozen=True)
class Engine:
    """One rollout. A decoding step reads the weights and the KV cache of all running completions.

    Attributes:
        weight_bytes: read in a decoding step.
        kv_bytes: of a token.
        kv_tokens: most that fit.
        bandwidth: bytes/s that decoding reaches.
        prefill: tokens/s.
        overhead: seconds of a decoding step beside reading.
    """

    weight_bytes: float
    kv_bytes: float
    kv_tokens: float
    bandwidth: float
    prefill: float
    overhead: float = 0.0

    def decode_seconds(self, context: float) -> float:
        """Return the seconds of a decoding step, given the total number of context tokens."""
        return self.overhead + (self.weight_bytes + self.kv_bytes * context) / self.bandwidth


@dataclass(frozen=True)
class Weights:
    """A weight update; times in seconds.

    Attributes:
        transfer: from the first byte sent until the last one received.
        install: pause of generation, for both values of `staged`.
        staged: rollouts generate and the trainer trains during the transfer; else both wait for it.
        recompute: the KV cache of running completions is recomputed with the new weights.
    """

    transfer: float
    install: float
    staged: bool
    recompute: bool


@dataclass(frozen=True)
class Setup:
    """A run.

    Attributes:
        prompt, length: tokens; a completion's length is lognormal with this mean and `sigma`, cut at twice the mean.
        train_seconds: of a token of a batch, all of the trainer's GPUs together.
    """

    engine: Engine
    rollouts: int
    groups: int
    prompt: int
    length: float
    sigma: float
    train_seconds: float
    staleness: int
    weights: Weights


# Qwen2.5-7B in bf16: 15.2 GB, 28 layers of 4 KV heads of 128: 57 KB a token. An H100 reads 3.35 TB/s (NVIDIA's data
# sheet); vLLM reaches about 4,500 tokens/s at a mean context of 8,192 with a full cache of 0.94 M tokens: 0.8 of it.
# Prefill: 0.94 M tokens in 39 s.
H100_7B = Engine(15.2 * GIGA, 57e3, 0.94e6, 0.8 * 3.35e12, 24e3)
# Llama-3.1-70B in bf16 over 8 H100s: 141 GB, 80 layers of 8 KV heads of 128: 328 KB a token; 0.9 of 8 x 80 GB is for
# weights and cache; 0.6 of the bandwidth is reached, as all-reduces take their part; prefill at 0.4 of 989 TFLOP/s.
H100_70B = Engine(141 * GIGA, 328e3, (0.9 * 640 - 141) * GIGA / 328e3, 0.6 * 8 * 3.35e12, 0.4 * 8 * 989e12 / 141e9)
# Training with activation checkpointing takes 8 FLOP a parameter and token; 5,400 tokens/s of 7.6 B parameters on an
# H100 are 0.33 of its 989 TFLOP/s, taken for both.
TRAINED = 0.33 * 989e12 / 8
# An update of today: the whole transfer with everyone waiting, over TCP at 0.76 GB/s (7B: 20 s). Staged: the same wire,
# but received while generating; then a pause of 47 ms and the copy into place at 25 GB/s a GPU (PCIe 5).
WIRE = 0.76 * GIGA
PAUSE_SECONDS, COPY = 0.047, 25 * GIGA


@dataclass
class Rollout:
    """The state of one rollout.

    Attributes:
        running: for each completion, tokens left, its tokens in all, and its group.
        context: tokens of all running completions; chunk: tokens that each generates now.
        debt: remaining seconds of a pause.
    """

    running: list[tuple[float, float, int]] = field(default_factory=list)
    context: float = 0.0
    chunk: float = 0.0
    debt: float = 0.0
    idle_since: float | None = 0.0
    idle: float = 0.0
    stalled: float = 0.0
    busy: bool = False


@dataclass(frozen=True)
class Outcome:
    """Per step: seconds; shares of the trainer's and the rollouts' time; bytes/s at the broker."""

    step: float
    trainer_idle: float
    rollout_idle: float
    stalled: float
    broker: float


class Simulation:
    """Events in the order of their times."""

    def __init__(self, setup: Setup, steps: int, left_out: int, seed: int = 0):
        self.setup, self.chance = setup, random.Random(seed)
        self.steps, self.left_out = steps, left_out
        self.now = 0.0
        self._events: list[tuple[float, int, str, int]] = []
        self._order = count()
        self.rollouts = [Rollout() for _ in range(setup.rollouts)]
        self.trained = self.live = self.started = 0
        self.tokens = 0.0
        self.unfinished: dict[int, int] = {}
        self.lengths: dict[int, float] = {}
        self.ready: list[int] = []
        self.training = False
        self.trainer_idle = 0.0
        self.waits_since = 0.0
        self.ends: list[tuple[float, float, float, float, float]] = []

    def run(self) -> Outcome:
        """Run until `steps` steps are trained; return the means without the first ones."""
        for number in range(len(self.rollouts)):
            self._fill(number)
        while self.trained < self.steps:
            self.now, _, what, which = heapq.heappop(self._events)
            getattr(self, what)(which)
        first, last = self.ends[self.left_out - 1], self.ends[-1]
        seconds, idle, rollout_idle, stalled, tokens = (b - a for a, b in zip(first, last, strict=True))
        all_rollouts = seconds * len(self.rollouts)
        return Outcome(
            seconds / (self.steps - self.left_out),
            idle / seconds,
            rollout_idle / all_rollouts,
            stalled / all_rollouts,
            tokens * EXPERIENCE_BYTES / seconds,
        )

    def _at(self, seconds: float, what: str, which: int = 0) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), what, which))

    # Rollouts

    def _fill(self, number: int) -> None:
        """Begin groups up to the limits of cache and admission."""
        setup, rollout = self.setup, self.rollouts[number]
        most = (self.live + setup.staleness + 1) * setup.groups
        # Long completions run longer: the mean context of those that run is E[L^2] / 2 E[L].
        room = setup.engine.kv_tokens / (setup.prompt + setup.length * math.exp(setup.sigma**2) / 2)
        while self.started < most and len(rollout.running) + GROUP_SIZE <= max(room, GROUP_SIZE):
            group, self.started = self.started, self.started + 1
            # A lognormal's mean is exp(mu + sigma^2 / 2).
            lengths = [
                min(setup.length * self.chance.lognormvariate(-(setup.sigma**2) / 2, setup.sigma), 2 * setup.length)
                for _ in range(GROUP_SIZE)
            ]
            rollout.running += [(length, length, group) for length in lengths]
            rollout.context += GROUP_SIZE * setup.prompt
            rollout.debt += setup.prompt / setup.engine.prefill  # shared by the group
            self.unfinished[group], self.lengths[group] = GROUP_SIZE, sum(lengths)
        if rollout.running and not rollout.busy:
            self._generate(number)

    def _generate(self, number: int) -> None:
        rollout = self.rollouts[number]
        if rollout.idle_since is not None:
            rollout.idle, rollout.idle_since = rollout.idle + self.now - rollout.idle_since, None
        rollout.chunk = min(CHUNK_TOKENS, min(left for left, _, _ in rollout.running))
        seconds = rollout.debt + rollout.chunk * self.setup.engine.decode_seconds(rollout.context)
        rollout.debt, rollout.busy = 0.0, True
        self._at(self.now + seconds, "_generated", number)

    def _generated(self, number: int) -> None:
        rollout = self.rollouts[number]
        rollout.busy = False
        rollout.context += rollout.chunk * len(rollout.running)
        self.tokens += rollout.chunk * len(rollout.running)
        running = [(left - rollout.chunk, length, group) for left, length, group in rollout.running]
        rollout.running = [each for each in running if each[0] > _NOTHING]
        for _, length, group in (each for each in running if each[0] <= _NOTHING):
            rollout.context -= self.setup.prompt + length
            self.unfinished[group] -= 1
            if not self.unfinished[group]:
                self.ready.append(group)
        self._fill(number)
        if not rollout.running:
            rollout.idle_since = self.now
        elif not rollout.busy:
            self._generate(number)
        self._train()

    # Trainer

    def _train(self) -> None:
        setup = self.setup
        if self.training or len(self.ready) < setup.groups:
            return
        self.trainer_idle += self.now - self.waits_since
        batch, self.ready = self.ready[: setup.groups], self.ready[setup.groups :]
        self.training = True
        tokens = sum(self.lengths.pop(group) for group in batch) + GROUP_SIZE * setup.groups * setup.prompt
        self._at(self.now + tokens * setup.train_seconds, "_trained")

    def _trained(self, _: int) -> None:
        weights = self.setup.weights
        self.trained += 1
        idle = sum(r.idle + (self.now - r.idle_since if r.idle_since is not None else 0.0) for r in self.rollouts)
        stalled = sum(rollout.stalled for rollout in self.rollouts)
        self.ends.append((self.now, self.trainer_idle, idle, stalled, self.tokens))
        if not weights.staged:
            for rollout in self.rollouts:
                if rollout.idle_since is None:  # who is idle waits for the update as it is
                    self._stall(rollout, weights.transfer)
        self._at(self.now + weights.transfer, "_updated", self.trained)
        if weights.staged:
            self._train_again()

    def _train_again(self) -> None:
        self.training, self.waits_since = False, self.now
        self._train()

    def _updated(self, version: int) -> None:
        weights, prefill = self.setup.weights, self.setup.engine.prefill
        self.live = version
        for number, rollout in enumerate(self.rollouts):
            self._stall(rollout, weights.install + (rollout.context / prefill if weights.recompute else 0.0))
            self._fill(number)
        if not weights.staged:
            self._train_again()

    @staticmethod
    def _stall(rollout: Rollout, seconds: float) -> None:
        rollout.debt += seconds
        rollout.stalled += seconds


# --- The table --------------------------------------------------------------------------------------------------------


def setups(staleness: int) -> dict[str, Setup]:
    """Return the runs of the table by name: half of the GPUs generate. 128 groups a step on 64 GPUs, 16 on 8."""

    def of(engine: Engine, gpus: int, tp: int, groups: int, parameters: float, path: str) -> Setup:
        transfer, copy = engine.weight_bytes / WIRE, engine.weight_bytes / tp / COPY
        staged = path != "waiting"
        weights = Weights(transfer, PAUSE_SECONDS + copy, staged, recompute=path != "staged, cache kept")
        train = parameters / TRAINED / (gpus / 2)
        return Setup(engine, gpus // 2 // tp, groups, 512, 16384, 0.5, train, staleness, weights)

    table = {}
    for path in ("waiting", "staged", "staged, cache kept"):
        table[f"7B, 8 H100, {path}"] = of(H100_7B, 8, 1, 16, 7.6e9, path)
        table[f"7B, 64 H100, {path}"] = of(H100_7B, 64, 1, 128, 7.6e9, path)
        table[f"70B, 256 H100, {path}"] = of(H100_70B, 256, 8, 128, 70.6e9, path)
    return table


def table() -> str:
    """Return the simulated runs as lines of Markdown."""
    lines = [
        "| run, weight path | staleness | step, s | trainer idle | rollouts idle | stalled by updates | broker, MB/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for staleness in (0, 1, 4):
        for name, setup in setups(staleness).items():
            came = Simulation(setup, STEPS, LEFT_OUT).run()
            shares = " | ".join(f"{share:.0%}" for share in (came.trainer_idle, came.rollout_idle, came.stalled))
            lines.append(f"| {name} | {staleness} | {came.step:.0f} | {shares} | {came.broker / 1e6:.2f} |")
    return "\n".join(lines)


# --- Beside a real run ------------------------------------------------------------------------------------------------


def as_measured(turns: Round, staleness: int) -> Setup:
    """Return the setup whose phases take what a run took in which they took turns."""
    generating = turns.account["trainer: waits for the batch"] / 1000
    training = turns.account["step"] / 1000 - generating
    # All completions run at once, and the longest has twice the mean's tokens.
    engine = Engine(0.0, 0.0, math.inf, 1.0, math.inf, overhead=generating / (2 * turns.length))
    tokens = DEMO.prompts * GROUP_SIZE * turns.length
    weights = Weights(0.0, 0.0, staged=True, recompute=False)  # the run's are within what it waits for a batch
    return Setup(engine, 1, DEMO.prompts, 0, turns.length, 0.5, training / tokens, staleness, weights)


def step_seconds(turns: Round, staleness: int) -> float:
    """Return what a step is to take: what is simulated, or what its processor time takes of all cores if that is more.

    GPUs are not shared by generation and training; the cores of a small machine are.
    """
    simulated = Simulation(as_measured(turns, staleness), DEMO.steps, DEMO.leave_out).run().step
    return max(simulated, turns.account["processor, all of it"] / 1000 / (os.cpu_count() or 1))


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description="Simulate runs on many GPUs.")
    parser.add_argument("--table", action="store_true", help="only simulate")
    arguments = parser.parse_args()
    print(table(), file=sys.stderr, flush=True)
    if arguments.table:
        return 0
    prepare = [ENVIRONMENTS / "trainer" / "bin" / "python", ROOT / "examples/arithmetic/prepare.py", MODEL_DATA]
    subprocess.run([*map(str, prepare)], check=True, timeout=PREPARE_SECONDS, stdout=sys.stderr)
    turns, beside = (ours(DEMO, "transformers", staleness) for staleness in (0, 1))
    report(
        *(
            Figure(
                f"simulate: step of the demo's model, max_staleness {staleness}, from what its phases take",
                "ms",
                1000 * step_seconds(turns, staleness),
                measured.account["step"],
                "measured",
                "lower",
            )
            for staleness, measured in enumerate((turns, beside))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
