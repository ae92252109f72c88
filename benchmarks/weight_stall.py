"""What a weight update costs those who generate: how long they stand still, and tokens a second around it.

An engine generates continuously in this process (the rollout's environment); the trainer's transport sends full
weights of 500 MB over Gloo from another process. Each update is received, installed during a pause, and generation
resumed, as in the service. Figures with limits: the pause of generation, at most the installation plus 100 ms; and
tokens/s while an update is received over a link limited to 100 MB/s (`tc`, in a new network namespace; not with
--free-link), at least four fifths of those just before. Then tokens/s in the seconds after an update against those
before: with the KV cache kept, and with it recomputed, which on a CPU takes as long as the prefill of all running
completions. Standard error has a bar chart of tokens/s around an update.

    .quartet/envs/rollout/bin/python benchmarks/weight_stall.py [--engine transformers] [--updates 6] [--size "30 M"]

By default both engines are measured.
"""

import argparse
import asyncio
import bisect
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measuring import ENVIRONMENTS, Figure, Side, report
from sizes import SIZES, write

TIMEOUT_SECONDS = 120.0
WINDOW_SECONDS = 3.0
MAX_NEW_TOKENS = 64
ALLOWANCE_SECONDS = 0.1
BUCKET_BYTES = 32 << 20  # the default of trainer.weights.bucket_bytes
BIN_SECONDS = 0.1
BARS_FROM, BARS_TO = -0.5, 1.5
LOOK_SECONDS = 0.01
STREAMS = 16
LINK_BYTES = 100_000_000  # a second
LEAST_SHARE = 0.8  # of the tokens a second before
ENGINES = ("transformers", "vllm")

# --- The trainer's side, in its own environment -----------------------------------------------------------------------


def send(folder: Path) -> None:
    """Open a group of one rollout, tell where, and send all weights at each line of standard input."""
    from quartet.v1 import rollout_pb2, tensor_pb2
    from safetensors.torch import load_file

    from quartet_common.weights import plan_buckets
    from quartet_trainer.weight_sync.rollouts import WeightGroup
    from quartet_trainer.weight_sync.transports import Broadcast, Packer, form_group

    torch.set_num_threads(1)
    weights = load_file(folder / "model.safetensors")
    dtype = tensor_pb2.Dtype.Value(str(next(iter(weights.values())).dtype).replace("torch.", "DTYPE_").upper())
    specs = [(name, dtype, tensor.shape) for name, tensor in weights.items()]
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, specs, BUCKET_BYTES)
    (folder / "manifest").write_bytes(manifest.SerializeToString())
    transport = Broadcast("gloo", "127.0.0.1")
    group = WeightGroup("bench", 1, 2, TIMEOUT_SECONDS, {}, lambda _: True)
    print(json.dumps({"port": transport.port, "secret": group.secret.hex()}), flush=True)
    form_group("gloo", transport, group)

    packer = Packer(manifest, copy=True)
    buckets = list(packer.pack(lambda: (each for each in weights.items())))
    for _ in sys.stdin:
        group.deadline = time.monotonic() + TIMEOUT_SECONDS
        transport.send(group, buckets)
        packer.checksums()


# --- The rollout's side -----------------------------------------------------------------------------------------------


async def keep_generating(engine) -> None:
    """Keep the engine busy until cancelled."""
    from quartet_rollout.engines import SamplingSettings

    number = 0

    async def stream(index: int) -> None:
        nonlocal number
        while True:
            number += 1
            sampling = SamplingSettings(max_new_tokens=MAX_NEW_TOKENS, seed=number)
            async for _ in engine.generate(f"{index}-{number}", [40 + index, 50, 60], 1, sampling):
                pass

    await asyncio.gather(*(stream(index) for index in range(STREAMS)))


class Watch:
    """Records the number of tokens every LOOK_SECONDS."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self._seen: list[tuple[float, int]] = []

    async def look(self) -> None:
        """Look until cancelled."""
        while True:
            self._seen.append((time.monotonic(), self._engine.stats().tokens_total))
            await asyncio.sleep(LOOK_SECONDS)

    def at(self, when: float) -> float:
        """Tokens by then, between two looks in proportion."""
        index = bisect.bisect_left(self._seen, (when, 0))
        (t0, n0), (t1, n1) = self._seen[index - 1], self._seen[index]
        return n0 + (n1 - n0) * (when - t0) / (t1 - t0)

    def bars(self, paused: list[float]) -> str:
        """Tokens a second in bins around the moments of pause: the median of the updates."""
        rates = []
        for number in range(round((BARS_TO - BARS_FROM) / BIN_SECONDS)):
            start = BARS_FROM + number * BIN_SECONDS
            counts = [self.at(when + start + BIN_SECONDS) - self.at(when + start) for when in paused]
            rates.append((start, statistics.median(counts) / BIN_SECONDS))
        most = max(rate for _, rate in rates) or 1.0
        return "\n".join(f"{start:+5.1f} s {rate:7.0f} {'#' * round(50 * rate / most)}" for start, rate in rates)


async def measure(engine, trainer: Side, manifest, updates: int, slow: int, watch: Watch) -> dict[str, list[float]]:
    """Return, for each update, seconds of stall and of its parts, and tokens/s before, during and after it; draw bars.

    `updates` of each kind: the KV cache kept and computed again; and `slow` over the slow link, where it is kept.
    """

    def tokens_since(when: float, tokens: int) -> float:
        return (engine.stats().tokens_total - tokens) / (time.monotonic() - when)

    async def tokens_per_second() -> float:
        now = time.monotonic(), engine.stats().tokens_total
        await asyncio.sleep(WINDOW_SECONDS)
        return tokens_since(*now)

    names = ("stall", "installation", "transfer", "before", "kept", "computed again", "before, slow", "during, slow")
    seen: dict[str, list[float]] = {name: [] for name in names}
    moments: dict[str, list[float]] = {"kept": [], "computed again": []}

    async def update(version: int, way: str | None) -> None:
        before = await tokens_per_second()
        began = time.monotonic(), engine.stats().tokens_total
        trainer.send({"send": version})
        await engine.receive_weights(manifest, TIMEOUT_SECONDS)
        paused, during = time.monotonic(), tokens_since(*began)
        await engine.pause("keep", keep_kv_cache=way != "computed again")
        installing = time.monotonic()
        await engine.install_weights(version)
        installed = time.monotonic()
        await engine.resume()
        stall = time.monotonic() - paused
        if way == "slow":
            seen["before, slow"].append(before)
            seen["during, slow"].append(during)
        elif way is not None:
            seen["stall"].append(stall)
            seen["installation"].append(installed - installing)
            seen["transfer"].append(paused - began[0])
            seen["before"].append(before)
            seen[way].append(await tokens_per_second())
            moments[way].append(paused)

    ways = [None, *["kept", "computed again"] * updates]  # the first makes the buffers
    for version, way in enumerate(ways):
        await update(version, way)
    if slow:
        with held_link():
            for version in range(slow):
                await update(len(ways) + version, "slow")
    for way, paused_at in moments.items():
        print(f"tokens/s around a pause, KV cache {way}:\n{watch.bars(paused_at)}", file=sys.stderr)
    return seen


@contextlib.contextmanager
def held_link() -> Iterator[None]:
    """Let no more than LINK_BYTES a second through the loopback interface of this namespace."""
    shape = ["tbf", "rate", f"{LINK_BYTES * 8}bit", "burst", "1mb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *shape], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def in_a_namespace(arguments: list[str]) -> None:
    """Execute this program in a new network namespace, whose loopback interface it can limit. Does not return."""
    rootless = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    begin = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    program = [sys.executable, __file__, *arguments, "--within"]
    os.execvp("unshare", ["unshare", "--net", *rootless, *begin, *program])


async def main(name: str, size: str, updates: int, slow: int) -> list[Figure]:
    from quartet.v1 import rollout_pb2

    from quartet_rollout.engines import WeightGroupInfo, create_engine

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write(size, folder)
        options = {"max_num_seqs": STREAMS} | ({"kv_cache_gib": 0.25} if name == "vllm" else {"device": "cpu"})
        engine = create_engine(name, str(folder), options)
        await engine.start()
        command = [str(ENVIRONMENTS / "trainer" / "bin" / "python"), __file__, "--send", text]
        with contextlib.ExitStack() as stack:
            trainer = Side(command, folder / "trainer.log", stack)
            sent = await asyncio.to_thread(trainer.receive)
            secret = bytes.fromhex(sent["secret"])
            info = WeightGroupInfo("gloo", "127.0.0.1", sent["port"], 1, 2, TIMEOUT_SECONDS, secret, 1)
            await engine.join_weight_group(info)
            manifest = rollout_pb2.WeightManifest.FromString((folder / "manifest").read_bytes())
            generating = asyncio.create_task(keep_generating(engine))
            watch = Watch(engine)
            looking = asyncio.create_task(watch.look())
            seen = await measure(engine, trainer, manifest, updates, slow, watch)
            for task in (generating, looking):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await engine.close()
    median = {key: statistics.median(values) for key, values in seen.items() if values}
    megabytes = sum(manifest.bucket_bytes) / 1e6
    print(json.dumps({key: [round(value, 3) for value in values] for key, values in seen.items()}), file=sys.stderr)
    title = f"weight_stall: update of {megabytes:.0f} MB, {name}"
    most = median["installation"] + ALLOWANCE_SECONDS
    figures = [Figure(f"{title}, stall", "s", median["stall"], most, "installation + 100 ms", "lower")]
    if slow:
        while_slow = f"{title}, while it comes over {LINK_BYTES / 1e6:.0f} MB/s"
        least = LEAST_SHARE * median["before, slow"]
        figures.append(Figure(while_slow, "tokens/s", median["during, slow"], least, "80% of before", "higher"))
    for way in ("kept", "computed again"):
        after = f"{title}, KV cache {way}"
        figures.append(Figure(after, "tokens/s", median[way], median["before"], "before the update", "higher"))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, help="this one only")
    parser.add_argument("--size", choices=SIZES, default="125 M", help="of the model")
    parser.add_argument("--updates", type=int, default=3, help="of each way")
    parser.add_argument("--free-link", action="store_true", help="without updates over a slow link")
    parser.add_argument("--within", action="store_true", help="in the namespace already")
    parser.add_argument("--send", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.send:
        send(arguments.send)
    elif not arguments.within and not arguments.free_link:
        in_a_namespace(sys.argv[1:])
    else:
        engines = [arguments.engine] if arguments.engine else ENGINES
        slow = 0 if arguments.free_link else arguments.updates
        chosen = (arguments.size, arguments.updates, slow)
        report(*(figure for name in engines for figure in asyncio.run(main(name, *chosen))))
