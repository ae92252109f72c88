"""An engine that computes in processes of its own, in a process that a test may kill: `python engine_owner.py ENGINE
OPTIONS FOLDER` says {"processes": ids} when it is up, then answers one JSON order a line.

{"do": "generate", "prompt", "length"}, greedily, answers {"tokens", "log_probs", "spans"};
{"do": "update", "folder", "files", "version"} installs a folder's weights from files that it
writes, and answers {"version"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
from harness import BUCKET_BYTES
from models import read_weights
from packing import write

from quartet_rollout.engines import Engine, SamplingSettings, WeightGroupInfo, create_engine

NO_MEETING = WeightGroupInfo("file", "", 0, 1, 2, 30.0, b"", 1)


async def main(name: str, options: str, folder: str) -> None:
    engine = create_engine(name, folder, json.loads(options))
    await engine.start()
    say({"processes": [child.pid for child in psutil.Process().children(recursive=True)]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        say(await (generate if order["do"] == "generate" else update)(engine, order))
    await engine.close()


async def generate(engine: Engine, order: dict) -> dict:
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=order["length"])
    (completion,) = [c async for c in engine.generate("one", order["prompt"], 1, sampling)]
    tokens, log_probs = completion.token_ids.tolist(), completion.log_probs.tolist()
    return {"tokens": tokens, "log_probs": log_probs, "spans": completion.version_spans}


async def update(engine: Engine, order: dict) -> dict:
    manifest, _ = write(read_weights(Path(order["folder"])), Path(order["files"]), BUCKET_BYTES)
    await engine.join_weight_group(NO_MEETING)
    await engine.pause("keep")
    await engine.receive_weights(manifest, 60.0, order["files"])
    await engine.install_weights(order["version"])
    await engine.resume()
    return {"version": engine.policy_version}


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
