"""Prompt groups from arrays to arrays through the broker, beside the same bytes straight through the same Redis.

Ours: a rollout process and a trainer process at a broker process, all at work at once, as they are used. The rollout
leases prompts, encodes a group for each and puts them, several calls under way; the trainer leases a step's batch,
decodes it, marks it trained, and commits every few steps. Prompts are queued beforehand. Measured is the wall time of a
fixed number of groups from the first put to the last commit.

Peer: redis-py in two processes of the same shape, with the same encoding and decoding and as many groups a call
(`broker_sides.py`): no gRPC, no deduplication, no manifests, no staleness. The ratio is the price of these.

Redis appends to its file and syncs it every second, as the launcher starts it. Both groups of `groups.py` are measured,
and all variants must yield the same arrays: a checksum is compared in the first round, which is not timed. The log says
what each process needs of CPU for a group: with fewer cores than processes, that is what decides.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from broker_load import create_run, submit
from groups import SHAPES
from measuring import Figure, process, report, service

from quartet_local.redis import redis_process, wait_until_ready

GROUPS_PER_STEP = 32
COMMIT_EVERY = 4
MAX_STALENESS = 4
STEPS = {"padded": 20, "ragged": 40}  # a round
ROUNDS = 5
VARIANTS = ("ours", "redis")


class Cpu:
    """CPU seconds of the processes that work for a variant, by name."""

    def __init__(self, processes: dict[str, psutil.Process]):
        self._processes = processes

    def read(self) -> dict[str, float]:
        times = {name: each.cpu_times() for name, each in self._processes.items()}
        return {name: time.user + time.system for name, time in times.items()}


class Sides:
    """A variant's producer and consumer, started once for all rounds."""

    def __init__(self, variant: str, settings: dict, folder: Path, stack: contextlib.ExitStack):
        self.variant = variant
        self._log = folder / f"{variant}-{settings['shape']}.log"
        program = str(Path(__file__).with_name("broker_sides.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # The consumer first: it makes the consumer group.
        self._processes = {
            role: stack.enter_context(process([sys.executable, program, variant, role], self._log, **pipes))
            for role in ("consumer", "producer")
        }
        for role in self._processes:
            self._tell(role, settings)
            self._hear(role)

    def round(self, count: int, check: bool = False) -> tuple[float, dict[str, float], int | None]:
        """Send `count` groups. Return the seconds it took, CPU seconds by role, and the checksum if asked for."""
        for role in self._processes:
            self._tell(role, {"groups": count, "check": check})
        consumed = self._hear("consumer")
        self._tell("producer", {"end": True})
        produced = self._hear("producer")
        cpu = {"producer": produced["cpu"], "consumer": consumed["cpu"]}
        return consumed["at"] - produced["at"], cpu, consumed["checksum"]

    def _tell(self, role: str, line: dict) -> None:
        print(json.dumps(line), file=self._processes[role].stdin, flush=True)

    def _hear(self, role: str) -> dict:
        line = self._processes[role].stdout.readline()
        if not line:
            raise RuntimeError(f"the {role} of '{self.variant}' has ended: {self._log.read_text()[-2000:]}")
        return json.loads(line)


def measure(
    shape: str, variants: list[str], settings: dict, options: argparse.Namespace, cpu: Cpu, folder: Path
) -> dict[str, float]:
    """Return groups per second of each variant, medians over rounds in turn."""
    steps = options.steps or STEPS[shape]
    count = steps * GROUPS_PER_STEP
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    used: dict[str, dict[str, float]] = {variant: {} for variant in variants}
    checksums = {}
    with contextlib.ExitStack() as stack:
        create_run(settings["address"], shape, GROUPS_PER_STEP, MAX_STALENESS)
        sides = [
            Sides(
                variant,
                settings | {"shape": shape, "run_id": shape if variant == "ours" else f"peer:{shape}"},
                folder,
                stack,
            )
            for variant in variants
        ]
        for index in range(-1, options.rounds):
            for each in sides if index % 2 == 0 else reversed(sides):
                if each.variant == "ours":
                    submit(settings["address"], shape, f"round-{index}", count)
                before = cpu.read()
                seconds, by_role, checksum = each.round(count, check=index < 0)
                after = cpu.read()
                if index < 0:
                    checksums[each.variant] = checksum
                    continue
                rates[each.variant].append(count / seconds)
                by_role |= {name: after[name] - before[name] for name in after}
                for name, spent in by_role.items():
                    used[each.variant][name] = used[each.variant].get(name, 0.0) + spent
    if len(set(checksums.values())) != 1:
        raise RuntimeError(f"the variants yield other arrays: {checksums}")
    for variant in variants:
        tell_cpu(shape, variant, rates[variant], used[variant], count * options.rounds)
    return {variant: statistics.median(each) for variant, each in rates.items()}


def tell_cpu(shape: str, variant: str, rates: list[float], used: dict[str, float], groups: int) -> None:
    """A line for the log: rate, and microseconds of CPU for a group by process."""
    micros = {name: spent / groups * 1e6 for name, spent in used.items()}
    parts = [f"{name} {value:5.0f}" for name, value in micros.items()]
    rate = f"{statistics.median(rates):6.0f}/s ({min(rates):.0f} to {max(rates):.0f})"
    print(
        f"{shape} {variant:6} {rate:24} us CPU a group: {', '.join(parts)}, all {sum(micros.values()):.0f}",
        file=sys.stderr,
    )


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Redis as the launcher does; yield its URL and its process."""
    with asyncio.Runner() as runner:

        async def start() -> tuple:
            server, url = redis_process(folder / "redis", folder / "redis.log", 0)
            server.start()
            await wait_until_ready(server, url, 20)
            return server, url

        server, url = runner.run(start())
        try:
            yield url, listener(int(url.rpartition(":")[2].partition("/")[0]))
        finally:
            runner.run(server.stop(5, asyncio.Event()))


def listener(port: int) -> psutil.Process:
    """Return the process below this one that listens on a port of the loopback."""
    for child in psutil.Process().children(recursive=True):
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in child.net_connections()):
            return child
    raise RuntimeError(f"no process of this benchmark listens on {port}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, help="steps a round")
    parser.add_argument("--per-call", type=int, default=32, help="groups in one call")
    parser.add_argument("--in-flight", type=int, default=2, help="pairs of calls that our producer has under way")
    options = parser.parse_args()
    figures = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, redis_server_process = stack.enter_context(redis_server(folder))
        address = stack.enter_context(service("broker", folder, [f"broker.redis_url={url}"]))
        cpu = Cpu({"broker": listener(int(address.rpartition(":")[2])), "redis": redis_server_process})
        settings = {
            "address": address,
            "redis_url": url,
            "per_call": options.per_call,
            "in_flight": options.in_flight,
            "groups_per_step": GROUPS_PER_STEP,
            "commit_every": COMMIT_EVERY,
        }
        for shape in options.shapes:
            rates = measure(shape, options.variants, settings, options, cpu, folder)
            if "redis" in rates and "ours" in rates:
                name = f"broker: {shape} groups, arrays to arrays"
                figures.append(
                    Figure(name, "groups/s", rates["ours"], rates["redis"], "redis-py, the same Redis", "higher")
                )
    report(*figures)


if __name__ == "__main__":
    main()
