"""A trainer's half of weight updates, as a process of its own: `python sender.py` reads one JSON order a line.

It is written against the wire alone (store prefix, rank 0, uint8 buckets in order), so that a change of either side
shows. Orders: {"do": "open", "epoch", "secret", "world_size", "timeout"} answers {"port"} and joins meanwhile,
answered by {"joined"}; {"do": "send", "folder", "bucket_bytes"} broadcasts; {"do": "send_some", …, "buckets"} sends the
first ones and stalls. It says {"pid"} first: the process that does this may be killed, and another takes over.
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
from packing import pack
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
        assert group is not None
        manifest, buckets = pack(read_weights(Path(order["folder"])), order["bucket_bytes"])
        count = order.get("buckets", len(buckets))
        for bucket in buckets[:count]:
            options = BroadcastOptions()
            options.rootRank = 0
            group.broadcast([bucket], options).wait()
        say({"sent": count})
        if order["do"] == "send_some":
            threading.Event().wait()


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
