"""A trainer's half of weight updates, as a process of its own: `python sender.py` reads one JSON order a line.

It is written against the wire alone (store prefix, rank 0, uint8 buckets in order), so that a change of either side
shows; tests/contract has it too, also with a release's packages. It says {"pid"} first: the process that does this may
be killed, and another takes over. A folder is a Hugging Face one.

order                                               answer
{"do": "open", "epoch", "secret", "world_size",     {"port"}: where its store listens; it joins as rank 0 meanwhile,
 "timeout"}                                         and says {"joined"} once all ranks are there
{"do": "plan", "folder", "bucket_bytes"}            {"manifest", "checksum"}: of an update; the manifest in hex
{"do": "send", "folder", "bucket_bytes"}            {"sent"}: buckets broadcast; 0 if others left the group
{"do": "send_some", "folder", …, "buckets"}         {"sent"}: the first ones; then it stalls
{"do": "score", "folder", "prompt", "completion"}   {"log_probs"}: of the completion's tokens, by plain transformers
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
from models import read_weights
from packing import checksum, pack
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore


def main() -> None:
    torch.set_num_threads(1)
    while child := os.fork():  # torch is imported once
        if os.waitpid(child, 0)[1] == 0:
            return
    serve()


def serve() -> None:
    say({"pid": os.getpid()})
    group: ProcessGroupGloo | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "open":
            timeout = timedelta(seconds=order["timeout"])
            world_size = order["world_size"]
            store = TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
            say({"port": store.port})
            prefix = PrefixStore(f"quartet/{order['epoch']}/{order['secret']}", store)
            try:
                group = ProcessGroupGloo(prefix, 0, world_size, timeout)
            except RuntimeError:
                group = None
            say({"joined": group is not None})
            continue
        folder = Path(order["folder"])
        if order["do"] == "score":
            say({"log_probs": score(folder, order["prompt"], order["completion"])})
            continue
        manifest, buckets = pack(read_weights(folder), order["bucket_bytes"])
        if order["do"] == "plan":
            say({"manifest": manifest.SerializeToString().hex(), "checksum": checksum(buckets)})
            continue
        assert group is not None
        count = order.get("buckets", len(buckets))
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            for bucket in buckets[:count]:
                group.broadcast([bucket], options).wait()
        except RuntimeError:
            count = 0
        say({"sent": count})
        if order["do"] == "send_some":
            threading.Event().wait()


def score(folder: Path, prompt: list[int], completion: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM  # seconds, which others need not spend

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
