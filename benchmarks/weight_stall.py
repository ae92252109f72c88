"""What a weight update costs those who generate: how long they stand still, and tokens a second around it.

An engine generates without pause in this process (the rollout's environment); a trainer's half, the publisher's own
`Transfer`, sends full weights from another. Each update is paused, received, installed and resumed as the service does
it. What the stall adds to the transfer is compared with 100 ms, and tokens a second in the seconds after an update with
those before it: where the KV cache is kept, and where it is computed again, which on a CPU takes as
long as reading all of the running completions anew. On standard error: tokens a second around an update, as bars.

    .quartet/envs/rollout/bin/python benchmarks/weight_stall.py [--engine transformers] [--updates 6]

Both engines by default, each where it computes by default: on a CPU in a process of its own.
"""

import argparse
import asyncio
import bisect
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import ENVIRONMENTS, Figure, process, report

TIMEOUT_SECONDS = 60.0
WINDOW_SECONDS = 3.0
MAX_NEW_TOKENS = 64
ALLOWANCE_SECONDS = 0.1
BUCKET_BYTES = 32 << 20  # the default of trainer.weights.bucket_bytes
BIN_SECONDS = 0.1
BARS_FROM, BARS_TO = -0.5, 1.5
LOOK_SECONDS = 0.01
STREAMS = 16
ENGINES = ("transformers", "vllm")

MODEL = {  # about 30 million parameters: 120 MB of float32
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def write_model(folder: Path) -> None:
    """A random Qwen2 with a tokenizer of single characters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**MODEL, dtype="float32")).save_pretrained(folder)
    vocabulary = {"<eos>": 0} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


# --- The trainer's side, in its own environment -----------------------------------------------------------------------


def send(folder: Path) -> None:
    """Open a group of one rollout, tell where, and send all weights at each line of standard input."""
    from quartet.v1 import rollout_pb2, tensor_pb2
    from safetensors.torch import load_file

    from quartet_common.weights import plan_buckets
    from quartet_trainer.publisher.group import WeightGroup
    from quartet_trainer.publisher.packing import Packer, Snapshot
    from quartet_trainer.publisher.process_group import GroupTransport
    from quartet_trainer.publisher.store import WeightStore
    from quartet_trainer.publisher.transfer import Transfer

    torch.set_num_threads(1)
    weights = load_file(folder / "model.safetensors")
    specs = [(name, tensor_pb2.DTYPE_FLOAT32, tensor.shape) for name, tensor in weights.items()]
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, specs, BUCKET_BYTES)
    (folder / "manifest").write_bytes(manifest.SerializeToString())
    store, secret, packer = WeightStore("127.0.0.1"), secrets.token_bytes(8), Packer(manifest)
    print(json.dumps({"port": store.port, "secret": secret.hex()}), flush=True)
    channel = GroupTransport("gloo", store).meet(1, secret, 2, TIMEOUT_SECONDS)

    snapshot = Snapshot(manifest)
    snapshot.take(1, iter(weights.items()))
    for _ in sys.stdin:
        group, deadline = WeightGroup(1, {}, channel), time.monotonic() + TIMEOUT_SECONDS
        Transfer("bench", 1, group, {}, lambda _: True, deadline, packer, snapshot).run()


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
    """How many tokens there were when; looks every LOOK_SECONDS."""

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


async def measure(engine, trainer: subprocess.Popen, manifest, updates: int, watch: Watch) -> dict[str, list[float]]:
    """Return, for each update, seconds of stall and transfer, and tokens/s before and after; draw bars around them."""

    async def tokens_per_second() -> float:
        began, before = time.monotonic(), engine.stats().tokens_total
        await asyncio.sleep(WINDOW_SECONDS)
        return (engine.stats().tokens_total - before) / (time.monotonic() - began)

    names = ("stall", "pause", "transfer", "installation", "resume", "before", "kept", "computed again")
    seen: dict[str, list[float]] = {name: [] for name in names}
    moments: dict[str, list[float]] = {"kept": [], "computed again": []}
    for version in range(2 * updates + 1):  # the first makes the buffers, and is left out
        keeps = bool(version % 2)
        before = await tokens_per_second()
        paused = time.monotonic()
        await engine.pause("keep", keep_kv_cache=keeps)
        began = time.monotonic()
        print("send", file=trainer.stdin, flush=True)
        await engine.receive_weights(manifest, TIMEOUT_SECONDS)
        received = time.monotonic()
        await engine.install_weights(version)
        installed = time.monotonic()
        await engine.resume()
        resumed = time.monotonic()
        after = await tokens_per_second()
        if version:
            parts = (began - paused, received - began, installed - received, resumed - installed)
            seen["stall"].append(sum(parts))
            for name, seconds in zip(("pause", "transfer", "installation", "resume"), parts, strict=True):
                seen[name].append(seconds)
            seen["before"].append(before)
            way = "kept" if keeps else "computed again"
            seen[way].append(after)
            moments[way].append(paused)
    for way, paused_at in moments.items():
        print(f"tokens/s around an update, KV cache {way}:\n{watch.bars(paused_at)}", file=sys.stderr)
    return seen


async def main(name: str, updates: int) -> list[Figure]:
    from quartet.v1 import rollout_pb2

    from quartet_rollout.engines import WeightGroupInfo, create_engine

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_model(folder)
        options = {"max_num_seqs": STREAMS} | ({"kv_cache_gib": 0.25} if name == "vllm" else {"device": "cpu"})
        engine = create_engine(name, str(folder), options)
        await engine.start()
        command = [str(ENVIRONMENTS / "trainer" / "bin" / "python"), __file__, "--send", text]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with process(command, folder / "trainer.log", **pipes) as trainer:
            told = json.loads(await asyncio.to_thread(trainer.stdout.readline))
            secret = bytes.fromhex(told["secret"])
            at = ("127.0.0.1", told["port"])
            info = WeightGroupInfo("gloo", *at, 1, 2, TIMEOUT_SECONDS, secret, 1)
            await engine.join_weight_group(info)
            manifest = rollout_pb2.WeightManifest.FromString((folder / "manifest").read_bytes())
            generating = asyncio.create_task(keep_generating(engine))
            watch = Watch(engine)
            looking = asyncio.create_task(watch.look())
            seen = await measure(engine, trainer, manifest, updates, watch)
            for task in (generating, looking):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await engine.close()
    median = {key: statistics.median(values) for key, values in seen.items()}
    size = sum(manifest.bucket_bytes) / 1e6
    print(json.dumps({key: [round(value, 3) for value in values] for key, values in seen.items()}), file=sys.stderr)
    title = f"weight_stall: update of {size:.0f} MB, {name}"
    beyond = statistics.median(stall - sent for stall, sent in zip(seen["stall"], seen["transfer"], strict=True))
    figures = [Figure(f"{title}, stall beyond the transfer", "s", beyond, ALLOWANCE_SECONDS, "100 ms", "lower")]
    for way in ("kept", "computed again"):
        name = f"{title}, KV cache {way}"
        figures.append(Figure(name, "tokens/s", median[way], median["before"], "before the update", "higher"))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, help="this one only")
    parser.add_argument("--updates", type=int, default=3, help="of each way")
    parser.add_argument("--send", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.send:
        send(arguments.send)
    else:
        engines = [arguments.engine] if arguments.engine else ENGINES
        report(*(figure for name in engines for figure in asyncio.run(main(name, arguments.updates))))
