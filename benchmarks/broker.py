"""Prompt groups from arrays to arrays through the broker, beside the same bytes straight through the same Redis.

Ours: a rollout process and a trainer process at a broker process, all at work at once, as they are used. The rollout
leases prompts, encodes a group for each and puts them, several calls under way; the trainer leases a step's batch,
decodes it, marks it trained, and commits every few steps. Prompts are queued beforehand. Measured is the wall time of a
fixed number of groups from the first put to the last commit.

First peer: redis-py in two processes of the same shape, with the same encoding and decoding and as many groups a call
(`broker_sides.py`): no gRPC, no deduplication, no manifests, no staleness. The ratio is the price of these.

Other peers: Ray, which keeps everything in memory (`broker_ray.py`): ColossalChat's queue, and an actor call with torch
tensors and with numpy arrays, at one group a message; and, since batching is open to Ray too, the queue at the 8
prompts a message that ColossalChat has by default, and numpy at as many a call as ours. The queue knows padded groups
alone.

Redis appends to its file and syncs it every second, as the launcher starts it. Both groups of `groups.py` are measured,
and all variants must yield the same arrays: a checksum is compared in the first round, which is not timed. The log says
what each process needs of CPU for a group: with fewer cores than processes, that is what decides.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from broker_load import create_run, submit
from groups import SHAPES
from measuring import ENVIRONMENTS, ROOT, Figure, process, report, service

from quartet_local.redis import redis_process, wait_until_ready

GROUPS_PER_STEP = 32
COMMIT_EVERY = 4
MAX_STALENESS = 4
STEPS = {"padded": 20, "ragged": 40}  # a round
ROUNDS = 5
CHECKED_STEPS = 10  # of the round whose checksums are compared, and of the Ray peers' rounds

# Name: way of broker_ray.py, groups a call.
RAY = {
    "ray-queue": ("queue", 1),
    "ray-queue-8": ("queue", 8),
    "ray-torch": ("torch", 1),
    "ray-numpy": ("numpy", 1),
    "ray-numpy-32": ("numpy", 32),
}
PEERS = {
    "redis": "redis-py, the same Redis",
    "ray-queue": "ColossalChat's queue on Ray, 1 group a message",
    "ray-queue-8": "ColossalChat's queue on Ray, 8 groups a message",
    "ray-torch": "Ray actor call, torch, 1 group a call",
    "ray-numpy": "Ray actor call, numpy, 1 group a call",
    "ray-numpy-32": "Ray actor call, numpy, 32 groups a call",
}


class Cpu:
    """CPU seconds of the processes that work for a variant, by name; of Redis also what rewrote its file."""

    def __init__(self, processes: dict[str, psutil.Process]):
        self._processes = processes

    def read(self) -> dict[str, float]:
        times = {name: each.cpu_times() for name, each in self._processes.items()}
        return {name: sum(each[:4]) for name, each in times.items()}  # user, system, and both of children that ended


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


class Ray:
    """The Ray peers: one process that drives them all, started once for all rounds."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self._log = folder / "ray.log"
        program = str(Path(__file__).with_name("broker_ray.py"))
        (folder / "ray").mkdir()
        command = [str(ENVIRONMENTS / "bench-ray" / "bin" / "python"), program, str(folder / "ray")]
        # A token of this run's own; else Ray leaves one in the home folder.
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        command = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = stack.enter_context(process(command, self._log, **pipes))

    def round(self, way: str, shape: str, per_call: int, groups: int, check: bool) -> dict:
        """Send `groups` groups; return what broker_ray.py answers."""
        request = {"way": way, "shape": shape, "groups": groups, "per_call": per_call, "check": check}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Ray has ended: {self._log.read_text()[-2000:]}")
        return json.loads(line)


class RaySide:
    """One of the Ray peers with one shape."""

    def __init__(self, ray: Ray, variant: str, shape: str):
        self.variant = variant
        self._ray, self._shape = ray, shape
        self._way, self._per_call = RAY[variant]

    def round(self, count: int, check: bool = False) -> tuple[float, dict[str, float], int | None]:
        """As `Sides.round`."""
        answer = self._ray.round(self._way, self._shape, self._per_call, count, check)
        return answer["seconds"], {"ray": answer["cpu"]}, answer["checksum"]


class Town:
    """What all rounds share: Redis, the broker, perhaps Ray; and the options."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack):
        self.options, self.folder = options, folder
        url, redis_process = stack.enter_context(redis_server(folder))
        address = stack.enter_context(service("broker", folder, [f"broker.redis_url={url}"]))
        self.cpu = Cpu({"broker": listener(int(address.rpartition(":")[2])), "redis": redis_process})
        self.ray = Ray(folder, stack) if set(options.variants) & set(RAY) else None
        self.settings = {
            "address": address,
            "redis_url": url,
            "per_call": options.per_call,
            "in_flight": options.in_flight,
            "groups_per_step": GROUPS_PER_STEP,
            "commit_every": COMMIT_EVERY,
        }

    def sides(self, shape: str, stack: contextlib.ExitStack) -> list:
        """Start the sides of all variants for a shape."""
        address = self.settings["address"]
        create_run(address, shape, GROUPS_PER_STEP, MAX_STALENESS)
        sides: list[Sides | RaySide] = []
        for variant in self.options.variants:
            if self.ray is not None and variant in RAY:
                if shape == "padded" or RAY[variant][0] != "queue":  # ColossalChat's way knows padded groups alone
                    sides.append(RaySide(self.ray, variant, shape))
            else:
                run_id = shape if variant == "ours" else f"peer:{shape}"
                settings = self.settings | {"shape": shape, "run_id": run_id}
                sides.append(Sides(variant, settings, self.folder, stack))
        return sides


def measure(shape: str, town: Town) -> dict[str, float]:
    """Return groups per second of each variant, medians over rounds in turn."""
    rates: dict[str, list[float]] = {}
    used: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}
    checksums = {}
    with contextlib.ExitStack() as stack:
        sides = town.sides(shape, stack)
        for index in range(-1, town.options.rounds):
            for each in sides if index % 2 == 0 else reversed(sides):
                steps = CHECKED_STEPS if index < 0 or each.variant in RAY else town.options.steps or STEPS[shape]
                count = steps * GROUPS_PER_STEP
                if each.variant == "ours":
                    submit(town.settings["address"], shape, f"round-{index}", count)
                before = town.cpu.read()
                seconds, by_role, checksum = each.round(count, check=index < 0)
                after = town.cpu.read()
                if index < 0:
                    checksums[each.variant] = checksum
                    continue
                rates.setdefault(each.variant, []).append(count / seconds)
                sent[each.variant] = sent.get(each.variant, 0) + count
                if each.variant not in RAY:
                    by_role |= {name: after[name] - before[name] for name in after}
                totals = used.setdefault(each.variant, {})
                for name, spent in by_role.items():
                    totals[name] = totals.get(name, 0.0) + spent
    if len(set(checksums.values())) != 1:
        raise RuntimeError(f"the variants yield different arrays: {checksums}")
    for variant in rates:
        tell_cpu(shape, variant, rates[variant], used[variant], sent[variant])
    return {variant: statistics.median(each) for variant, each in rates.items()}


def tell_cpu(shape: str, variant: str, rates: list[float], used: dict[str, float], groups: int) -> None:
    """A line for the log: rate, and microseconds of CPU for a group by process."""
    micros = {name: spent / groups * 1e6 for name, spent in used.items()}
    parts = [f"{name} {value:5.0f}" for name, value in micros.items()]
    rate = f"{statistics.median(rates):6.0f}/s ({min(rates):.0f} to {max(rates):.0f})"
    print(
        f"{shape} {variant:12} {rate:24} us CPU a group: {', '.join(parts)}, all {sum(micros.values()):.0f}",
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


def compare(rates: dict[str, dict[str, float]]) -> list[Figure]:
    """Return our rates beside each peer's."""
    figures = []
    for shape, measured in rates.items():
        for variant in measured:
            if variant != "ours":
                name = f"broker: {shape} groups, arrays to arrays"
                figures.append(Figure(name, "groups/s", measured["ours"], measured[variant], PEERS[variant], "higher"))
    if "ragged" in rates:
        # What is ragged with us is padded there.
        for variant in (variant for variant in rates.get("padded", {}) if RAY.get(variant, ("",))[0] == "queue"):
            ours, peer = rates["ragged"]["ours"], rates["padded"][variant]
            name = "broker: ragged groups, arrays to arrays"
            figures.append(Figure(name, "groups/s", ours, peer, f"{PEERS[variant]}, padded as it must", "higher"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=("ours", *PEERS), default=["ours", *PEERS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, help="steps a round, of ours and redis-py")
    parser.add_argument("--per-call", type=int, default=32, help="groups in one call, of ours and redis-py")
    parser.add_argument("--in-flight", type=int, default=2, help="pairs of calls that our producer has under way")
    options = parser.parse_args()
    if set(options.variants) & set(RAY):
        environments = str(ROOT / "deploy" / "local" / "environments.py")
        subprocess.run([sys.executable, environments, "bench-ray"], check=True, stdout=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        town = Town(options, folder, stack)
        rates = {shape: measure(shape, town) for shape in options.shapes}
    report(*(compare(rates) if "ours" in options.variants else ()))


if __name__ == "__main__":
    main()
