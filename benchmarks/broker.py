"""Prompt groups from arrays to arrays through the broker, beside the same bytes straight through the same Redis.

Ours: a rollout process, a trainer process and a broker process, working concurrently. The rollout leases prompts,
encodes a group for each and puts them, with several concurrent calls of at most 6 MiB; the trainer leases a step's
batch, prefetches the next, decodes, marks the step trained, and commits every few steps. Prompts are queued beforehand.
The figure is the wall time of a fixed number of groups from the first put to the last commit.

First peer: redis-py in two similar processes, with the same encoding and decoding and as many groups per call
(`broker_sides.py`): no gRPC, no deduplication, no manifests, no staleness. The ratio is the cost of these.

The limit: a relay, a gRPC server that only forwards the same bytes to and from Redis (`broker_relay.py`). Its rate
against redis-py's is the cost of gRPC in Python; ours against its rate is the cost of the broker's own work.

Other peers: Ray, which keeps everything in memory (`broker_ray.py`): ColossalChat's queue, with its default of 8
prompts per message and padded groups, the only ones it supports; and an actor call with numpy arrays, with as many per
call as ours. They do not depend on our batch sizes, and run with the first of them.

Redis appends to its log and syncs it every second, as the launcher configures it; before each round the log is
rewritten and the disk is given time to finish. Both kinds of groups of `groups.py` are measured, and all variants must
yield the same arrays: a checksum is compared in the first round, which is not timed. The log has each process's CPU
time per group, which determines the rate if there are fewer cores than processes.
"""

import argparse
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import redis
from broker_load import create_run, submit
from broker_processes import cpu_seconds, listener, redis_server
from groups import SHAPES
from measuring import ENVIRONMENTS, ROOT, START_SECONDS, Figure, Side, free_port, process, report, service

from quartet_common.channel import connect_sync

BATCHES = (32, 128)  # groups a step and a call
COMMIT_EVERY = 4
MAX_STALENESS = 4
GROUPS = {"padded": 640, "ragged": 1280}  # a round
ROUNDS = 7
REWRITE_SECONDS = 60
CHECKED_GROUPS = 384  # of the round whose checksums are compared, and of the Ray peers' rounds

# Way of broker_ray.py: groups a call.
RAY = {"ray-queue": 8, "ray-numpy": BATCHES[0]}
RELAY = "a bare gRPC relay to the same Redis"
PEERS = {
    "redis": "redis-py, the same Redis",
    "relay": RELAY,
    "ray-queue": f"ColossalChat's queue on Ray, {RAY['ray-queue']} groups a message",
    "ray-numpy": f"Ray actor call, numpy, {RAY['ray-numpy']} groups a call",
}


class Sides:
    """A variant's producer and consumer, started once for all rounds."""

    def __init__(self, variant: str, settings: dict, folder: Path, stack: contextlib.ExitStack):
        self.variant = variant
        program = str(Path(__file__).with_name("broker_sides.py"))
        log = folder / f"{variant}-{settings['shape']}.log"
        # The consumer first: it makes the consumer group.
        self._consumer, self._producer = (
            Side([sys.executable, program, variant, role], log, stack) for role in ("consumer", "producer")
        )
        for side in (self._consumer, self._producer):
            side.send(settings)
            side.receive()

    def round(self, count: int, check: bool = False) -> tuple[float, dict[str, float], int | None]:
        """Send `count` groups. Return the seconds it took, CPU seconds by role, and the checksum if asked for."""
        for side in (self._consumer, self._producer):
            side.send({"groups": count, "check": check})
        consumed = self._consumer.receive()
        self._producer.send({"end": True})
        produced = self._producer.receive()
        cpu = {"producer": produced["cpu"], "consumer": consumed["cpu"]}
        return consumed["at"] - produced["at"], cpu, consumed["checksum"]


def ray_side(folder: Path, stack: contextlib.ExitStack) -> Side:
    """Start the Ray peers: one process drives them all."""
    program = str(Path(__file__).with_name("broker_ray.py"))
    (folder / "ray").mkdir()
    # A token of this run's own, and not on a command line; else Ray leaves one in the home folder.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    python = str(ENVIRONMENTS / "bench-ray" / "bin" / "python")
    return Side([python, program, str(folder / "ray")], folder / "ray.log", stack)


class RaySide:
    """One of the Ray peers with one shape."""

    def __init__(self, ray: Side, variant: str, shape: str):
        self.variant = variant
        self._ray, self._shape = ray, shape

    def round(self, count: int, check: bool = False) -> tuple[float, dict[str, float], int | None]:
        """As `Sides.round`."""
        request = {"way": self.variant, "shape": self._shape, "per_call": RAY[self.variant]}
        self._ray.send(request | {"groups": count, "check": check})
        answer = self._ray.receive()
        return answer["seconds"], {"ray": answer["cpu"]}, answer["checksum"]


class Setting:
    """Redis, the broker, optionally Ray, and the options of all rounds."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack):
        self.options, self.folder = options, folder
        url, server = stack.enter_context(redis_server(folder))
        self._client = stack.enter_context(redis.Redis.from_url(url))
        address = stack.enter_context(service("broker", folder, [f"broker.redis_url={url}"]))
        self._processes = {"broker": listener(address), "redis": server}
        relay = self._start_relay(url, stack) if "relay" in options.variants else ""
        self.ray = ray_side(folder, stack) if set(options.variants) & set(RAY) else None
        self.settings = {
            "address": address,
            "redis_url": url,
            "relay": relay,
            "in_flight": options.in_flight,
            "commit_every": COMMIT_EVERY,
            "arrays": True,
        }

    def _start_relay(self, redis_url: str, stack: contextlib.ExitStack) -> str:
        port = free_port()
        program = str(Path(__file__).with_name("broker_relay.py"))
        command = [str(ENVIRONMENTS / "broker" / "bin" / "python"), program, str(port), redis_url]
        log = self.folder / "relay.log"
        stack.enter_context(process(command, log))
        address = f"127.0.0.1:{port}"
        with connect_sync(address) as channel:
            try:
                grpc.channel_ready_future(channel).result(START_SECONDS)
            except grpc.FutureTimeoutError:
                raise RuntimeError(f"the relay does not serve: {log.read_text()[-2000:]}") from None
        self._processes["relay"] = listener(address)
        return address

    def calm(self) -> None:
        """Have Redis' log short and the disk idle, or rounds would pay for what those before them wrote."""
        self._client.bgrewriteaof()
        deadline = time.monotonic() + REWRITE_SECONDS
        while self._client.info("persistence")["aof_rewrite_in_progress"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Redis has not rewritten its log in {REWRITE_SECONDS} s")
            time.sleep(0.01)
        os.sync()

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds that broker and Redis have used."""
        return {name: cpu_seconds(each) for name, each in self._processes.items()}

    def sides(self, shape: str, batch: int, stack: contextlib.ExitStack) -> list:
        """Start the sides of all variants for a shape and a batch size."""
        run = f"{shape}-{batch}"
        create_run(self.settings["address"], run, batch, MAX_STALENESS)
        variants = [each for each in self.options.variants if each not in RAY or batch == self.options.batches[0]]
        sides: list[Sides | RaySide] = []
        for variant in variants:
            if self.ray is not None and variant in RAY:
                if shape == "padded" or variant != "ray-queue":
                    sides.append(RaySide(self.ray, variant, shape))
            else:
                run_id = run if variant == "ours" else f"{variant}:{run}"
                settings = {"shape": shape, "run_id": run_id, "groups_per_step": batch, "per_call": batch}
                settings |= self.settings
                sides.append(Sides(variant, settings, self.folder, stack))
        return sides


def measure(shape: str, batch: int, setting: Setting) -> dict[str, float]:
    """Return groups per second of each variant, medians over rounds in turn."""
    rates: dict[str, list[float]] = {}
    used: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}
    checksums = {}
    with contextlib.ExitStack() as stack:
        sides = setting.sides(shape, batch, stack)
        for index in range(-1, setting.options.rounds):
            for each in sides if index % 2 == 0 else reversed(sides):
                brief = index < 0 or each.variant in RAY
                count = CHECKED_GROUPS if brief else setting.options.groups or GROUPS[shape]
                if each.variant == "ours":
                    submit(setting.settings["address"], f"{shape}-{batch}", f"round-{index}", count)
                setting.calm()
                before = setting.cpu()
                seconds, by_role, checksum = each.round(count, check=index < 0)
                after = setting.cpu()
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
        tell_cpu(f"{shape} x {batch}", variant, rates[variant], used[variant], sent[variant])
    return {variant: statistics.median(each) for variant, each in rates.items()}


def tell_cpu(what: str, variant: str, rates: list[float], used: dict[str, float], groups: int) -> None:
    """A line for the log: rate, and microseconds of CPU for a group by process."""
    micros = {name: spent / groups * 1e6 for name, spent in used.items()}
    parts = [f"{name} {value:5.0f}" for name, value in micros.items()]
    rate = f"{statistics.median(rates):6.0f}/s ({min(rates):.0f} to {max(rates):.0f})"
    print(
        f"{what} {variant:12} {rate:24} us CPU a group: {', '.join(parts)}, all {sum(micros.values()):.0f}",
        file=sys.stderr,
    )


def compare(rates: dict[tuple[str, int], dict[str, float]]) -> list[Figure]:
    """Return our rates beside each peer's."""
    figures = []
    for (shape, batch), measured in rates.items():
        name = f"broker: {shape} groups, {batch} a call"
        if {"relay", "redis"} <= measured.keys():
            limit = f"{name}, {RELAY}"
            figures.append(Figure(limit, "groups/s", measured["relay"], measured["redis"], PEERS["redis"], "higher"))
        peers = {PEERS[variant]: rate for variant, rate in measured.items() if variant != "ours"}
        if shape == "ragged" and (queue := rates.get(("padded", batch), {}).get("ray-queue")):
            peers[f"{PEERS['ray-queue']}, padded as it must"] = queue
        for peer, rate in peers.items():
            figures.append(Figure(f"{name}, arrays to arrays", "groups/s", measured["ours"], rate, peer, "higher"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=("ours", *PEERS), default=["ours", *PEERS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--groups", type=int, help="groups a round, of ours and redis-py; a multiple of the batches")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="groups a step and a call, of both")
    parser.add_argument("--in-flight", type=int, default=2, help="concurrent pairs of calls of our producer")
    options = parser.parse_args()
    if set(options.variants) & set(RAY):
        environments = str(ROOT / "deploy" / "local" / "environments.py")
        subprocess.run([sys.executable, environments, "bench-ray"], check=True, stdout=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setting = Setting(options, folder, stack)
        pairs = [(shape, batch) for batch in options.batches for shape in options.shapes]
        rates = {(shape, batch): measure(shape, batch, setting) for shape, batch in pairs}
    report(*(compare(rates) if "ours" in options.variants else ()))


if __name__ == "__main__":
    main()
