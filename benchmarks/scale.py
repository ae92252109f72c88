"""Many rollouts at one broker; memory over many groups; and what Redis needs to keep a group.

- 100,000 groups of 1 KB, put and committed: memory of Redis (`used_memory` without buffers of connections and of its
  log) and of the broker (RSS) at the end, against that after 20,000. The run remembers 10,000 settled instances, a
  limit that is reached by then.
- 2,000 ragged groups of 44 KB put and not leased: the growth of that memory, including prompts, against the bytes of
  their tensors.
- 1, 8, 64, 256 rollouts, each with its own connection, membership and heartbeat, in two processes, with one broker and
  one trainer; ragged groups, 4 per call. First at full speed, one concurrent call each (a single rollout has two):
  groups per second from the first put to the last commit, medians of rounds in turn, against one rollout. Then at half
  that rate, each "generating" for a random time between lease and put: the latency of LeasePrompts. The admission limit
  is high and prompts are queued beforehand, so that calls do not wait for the trainer.

The log has the latencies for all counts, the CPU of broker and Redis per group, and the memory after each 20,000
groups.
"""

import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import redis
from broker_load import create_run, encode_group, submit
from broker_processes import cpu_seconds, listener, redis_server
from broker_sides import DISTINCT
from groups import make_groups
from measuring import Figure, Side, report, service

ROLLOUTS = (1, 8, 64, 256)
PROCESSES = 2
PER_CALL = 4
GROUPS_PER_STEP = 64
OPEN_GATE = 64  # max_staleness: 4160 concurrent groups
STEPS = 40  # of a measurement at full speed
ROUNDS = 5  # of these
PACED_CYCLES = 3  # of each rollout at its pace, and at least
PACED_STEPS = 20
PACED_SHARE = 0.5  # of the rate at full speed
P99_LIMIT_MS = 250.0

SMALL_BYTES = 1000
FLAT_GROUPS, FLAT_PORTION = 100_000, 20_000
REMEMBERED = 10_000

KEPT_GROUPS = 2000
KEPT_LIMIT = 1.5


class Load:
    """Rollouts and a trainer at a run of their own, all members before the first put."""

    def __init__(self, address: str, run_id: str, folder: Path, stack: contextlib.ExitStack, **settings):
        self._address, self._run_id = address, run_id
        create_run(address, run_id, GROUPS_PER_STEP, OPEN_GATE)
        names = [f"rollout-{n}" for n in range(settings.pop("rollouts"))]
        common = {"address": address, "run_id": run_id, "shape": "ragged", "commit_every": 4, **settings}
        common |= {"groups_per_step": GROUPS_PER_STEP, "arrays": False}
        log = folder / f"{run_id}.log"
        self._trainer = ours("consumer", common | {"per_call": 32}, log, stack)
        shares = filter(None, (names[n::PROCESSES] for n in range(PROCESSES)))
        self._rollouts = [ours("producer", common | {"names": share}, log, stack) for share in shares]
        for side in (self._trainer, *self._rollouts):
            side.receive()
        self._submitted = 0

    def queue(self, groups: int) -> None:
        """Submit prompts."""
        submit(self._address, self._run_id, f"part-{self._submitted}", groups)
        self._submitted += 1

    def start(self) -> None:
        """Let the rollouts begin."""
        for side in self._rollouts:
            side.send({"go": True})

    def train(self, steps: int) -> float:
        """Train `steps` steps; return the time of the last commit."""
        self._trainer.send({"groups": steps * GROUPS_PER_STEP, "check": False})
        return self._trainer.receive()["at"]

    def end(self) -> tuple[float, np.ndarray]:
        """Stop the rollouts. Return when the first put began, and what each lease took, in milliseconds."""
        for side in self._rollouts:
            side.send({"end": True})
        answers = [side.receive() for side in self._rollouts]
        began = min(each["at"] for each in answers if each["at"])
        return began, np.array([second for each in answers for second in each["leases"]]) * 1000


def ours(role: str, settings: dict, log: Path, stack: contextlib.ExitStack) -> Side:
    """Start a side of ours, see broker_sides."""
    side = Side([sys.executable, str(Path(__file__).with_name("broker_sides.py")), "ours", role], log, stack)
    side.send(settings)
    return side


def measure(
    address: str, folder: Path, processes: dict[str, psutil.Process], rollouts: int, pace: float, index: int = 0
) -> tuple[float, np.ndarray]:
    """Return groups per second and the leases' milliseconds. `pace`: groups per second, 0 for as fast as they can."""
    steps = max(PACED_STEPS, PACED_CYCLES * rollouts * PER_CALL // GROUPS_PER_STEP) if pace else STEPS
    think = rollouts * PER_CALL / pace if pace else 0.0
    in_flight = 2 if rollouts == 1 and not pace else 1
    run_id = f"rollouts-{rollouts}-{'paced' if pace else index}"
    with contextlib.ExitStack() as stack:
        settings = {"rollouts": rollouts, "per_call": PER_CALL, "in_flight": in_flight, "think": think}
        load = Load(address, run_id, folder, stack, **settings)
        load.queue(steps * GROUPS_PER_STEP)
        before = {name: cpu_seconds(each) for name, each in processes.items()}
        load.start()
        ended = load.train(steps)
        used = {name: cpu_seconds(each) - before[name] for name, each in processes.items()}
        began, leases = load.end()
    rate = steps * GROUPS_PER_STEP / (ended - began)
    p50, p99 = np.percentile(leases, [50, 99])
    speed = f"paced at {pace:.0f}/s" if pace else "full speed"
    cpu = ", ".join(f"{name} {spent / (steps * GROUPS_PER_STEP) * 1e6:.0f}" for name, spent in used.items())
    log(
        f"{rollouts:4} rollouts, {speed:15} {rate:6.0f} groups/s, LeasePrompts p50 {p50:7.1f} ms, p99 {p99:7.1f} ms,"
        f" us CPU a group: {cpu}"
    )
    return rate, leases


def rollouts_figures(address: str, folder: Path, processes: dict[str, psutil.Process]) -> list[Figure]:
    rounds: dict[int, list[float]] = {count: [] for count in ROLLOUTS}
    for index in range(ROUNDS):  # in turn, there and back: what else the machine does meets all of them
        for count in ROLLOUTS if index % 2 == 0 else reversed(ROLLOUTS):
            rounds[count].append(measure(address, folder, processes, count, 0.0, index)[0])
    rates = {count: statistics.median(each) for count, each in rounds.items()}
    paced = {}
    for count in ROLLOUTS:
        _, leases = measure(address, folder, processes, count, min(rates.values()) * PACED_SHARE)
        paced[count] = float(np.percentile(leases, 99))
    figures = [
        Figure(f"scale: {count} rollouts", "groups/s", rates[count], rates[1], "1 rollout", "higher")
        for count in ROLLOUTS[1:]
    ]
    for count in ROLLOUTS:
        name = f"scale: p99 of LeasePrompts, {count} rollouts at half speed"
        figures.append(Figure(name, "ms", paced[count], P99_LIMIT_MS, "limit", "lower"))
    return figures


def flat_figures(address: str, folder: Path, client: redis.Redis, broker: psutil.Process) -> list[Figure]:
    kept: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        load = Load(address, "flat", folder, stack, rollouts=4, per_call=64, in_flight=1, bytes=SMALL_BYTES)
        load.start()
        for done in range(FLAT_PORTION, FLAT_GROUPS + 1, FLAT_PORTION):
            groups = FLAT_PORTION // GROUPS_PER_STEP * GROUPS_PER_STEP
            load.queue(groups)
            load.train(groups // GROUPS_PER_STEP)
            kept.append((memory_of(client) / 1e6, broker.memory_info().rss / 1e6))
            log(f"{done:7} groups: Redis {kept[-1][0]:.1f} MB, broker {kept[-1][1]:.1f} MB")
        load.end()
    name, peer = f"scale: memory of {{}} after {FLAT_GROUPS:,} groups", f"after {FLAT_PORTION:,}"
    return [
        Figure(name.format(who), "MB", kept[-1][index], kept[0][index], peer, "lower")
        for index, who in enumerate(("Redis", "the broker"))
    ]


def kept_figure(address: str, folder: Path, client: redis.Redis) -> Figure:
    """Compare Redis' memory of ready groups with the bytes of their tensors."""
    with contextlib.ExitStack() as stack:
        load = Load(address, "kept", folder, stack, rollouts=1, per_call=32, in_flight=1)
        before = memory_of(client)
        load.queue(KEPT_GROUPS)
        load.start()
        while int(client.hget("q:{kept}:stats", "ready") or 0) < KEPT_GROUPS:
            client.ping()  # the rollout is at work; its end is seen by the limit of the benchmark
        load.end()
        grown = memory_of(client) - before
    sizes = [len(encode_group(group)) for group in make_groups("ragged", DISTINCT)]
    payload = sum(sizes[n % DISTINCT] for n in range(KEPT_GROUPS))
    log(
        f"{KEPT_GROUPS} ready groups: {grown / KEPT_GROUPS:.0f} bytes each in Redis,"
        f" {payload / KEPT_GROUPS:.0f} of them payload"
    )
    return Figure(
        "scale: Redis memory of a ready group / its payload", "x", grown / payload, KEPT_LIMIT, "limit", "lower"
    )


def memory_of(client: redis.Redis) -> int:
    """Return the bytes that Redis uses, but for the buffers of its connections and of its log."""
    memory = client.info("memory")
    return memory["used_memory"] - memory["mem_clients_normal"] - memory["mem_aof_buffer"]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, server = stack.enter_context(redis_server(folder))
        settings = [f"broker.redis_url={url}", f"broker.remembered_instances={REMEMBERED}"]
        address = stack.enter_context(service("broker", folder, settings))
        client = stack.enter_context(redis.Redis.from_url(url))
        broker = listener(address)
        figures = flat_figures(address, folder, client, broker)
        figures.append(kept_figure(address, folder, client))
        figures += rollouts_figures(address, folder, {"broker": broker, "redis": server})
    report(*figures)


if __name__ == "__main__":
    main()
