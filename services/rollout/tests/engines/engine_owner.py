"""An engine that computes in processes of its own, in a process that a test may kill: `python engine_owner.py ENGINE
OPTIONS FOLDER` says {"processes": ids} when it is up, then answers one JSON order a line.

{"do": "generate", "prompt", "length"}, greedily, answers {"tokens", "log_probs", "spans"};
{"do": "update", "folder", "group", "version"} installs the weights that come through the group while a completion of
"prompt" is under way, and answers as "generate".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from harness import BUCKET_BYTES, PATIENCE, Answering
from models import read_weights
from packing import pack
from preloaded import process_of

from quartet_rollout.engines import Engine, SamplingSettings, WeightGroupInfo, create_engine


async def main(name: str, options: str, folder: str) -> None:
    engine = create_engine(name, folder, json.loads(options))
    await engine.start()
    say({"processes": [process.pid for process in beneath(os.getpid())]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        do = generate if order["do"] == "generate" else update_in_flight
        say(await do(engine, order))
    await engine.close()


async def generate(engine: Engine, order: dict) -> dict:
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=order["length"])
    (completion,) = [c async for c in engine.generate("one", order["prompt"], 1, sampling)]
    tokens, log_probs = completion.token_ids.tolist(), completion.log_probs.tolist()
    return {"tokens": tokens, "log_probs": log_probs, "spans": completion.version_spans}


async def update_in_flight(engine: Engine, order: dict) -> dict:
    group = order["group"]
    await engine.join_weight_group(WeightGroupInfo(**group | {"secret": bytes.fromhex(group["secret"])}))
    manifest, _ = pack(read_weights(Path(order["folder"])), BUCKET_BYTES)
    while True:  # Until a completion is cut: one may end before the pause comes.
        begun = engine.stats().tokens_total
        generating = asyncio.create_task(generate(engine, order))
        while engine.stats().tokens_total < begun + 5:
            await asyncio.sleep(0.002)
        await engine.pause("keep")
        if engine.stats().running:
            break
        await engine.resume()
        await generating
    await engine.receive_weights(manifest, PATIENCE)
    await engine.install_weights(order["version"])
    await engine.resume()
    return await generating


def beneath(pid: int) -> Iterator[psutil.Process]:
    """The processes that a process started, and those that they did."""
    for child in psutil.Process(pid).children():
        if "resource_tracker" not in " ".join(child.cmdline()):
            yield child
            yield from beneath(process_of(child.pid))


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


class Owner(Answering):
    """That process, and the engine's own."""

    def __init__(self, engine: str, folder: Path, log: Path, **options: Any) -> None:
        command = [sys.executable, __file__, engine, json.dumps(options), str(folder)]
        # It leads a group, and no session: a worker of vLLM makes itself a group's leader, which no session's can.
        super().__init__(command, log, start_new_session=False, process_group=0)
        self.processes = [psutil.Process(pid) for pid in self.hear()["processes"]]

    def close(self) -> None:
        super().close()
        for process in self.processes:
            if process.is_running():
                process.kill()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
