"""The Ray peers of the broker's benchmark, in an environment of their own: `broker_ray.py FOLDER`, rounds on its input.

Each input line is a round: {"way", "shape", "groups", "per_call", "check"}. The output is a line for each: seconds from
the first call to the last group taken, CPU seconds of all of Ray's processes, and the checksum if requested.

Producer and consumer are actors, each a process; everything stays in memory, nothing is deduplicated or acknowledged.

    ray-queue  ColossalChat's method (its zero-bubble pipeline): a third actor holds a list. The producer asks it for
               permission to generate, then appends a batch of prompts as a dict of torch tensors and waits for the
               response; the consumer requests the batch by its number, gets a deep copy, and splits it into groups. If
               it is empty, the original sleeps for a second, and this one for a millisecond.
    ray-numpy  the producer calls the consumer with groups as dicts of numpy arrays, which Ray transfers in shared
               memory without pickling their bytes, with 8 concurrent calls
"""

import copy
import json
import os
import sys
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import psutil
import ray
import torch
from groups import Arrays, checksum, make_groups

DISTINCT = 64
IN_FLIGHT = 8
STORE_BYTES = 1 << 30
QUEUE_LIMIT = 160  # groups, like our admission limit
PAUSE_SECONDS = 0.001
STALL_SECONDS = 60.0

Tensors = dict[str, torch.Tensor]


def stack(groups: list[Arrays]) -> Tensors:
    """Return a batch as one tensor per name, the group first."""
    return {name: torch.from_numpy(np.stack([group[name] for group in groups])) for name in groups[0]}


def unstack(batch: Tensors) -> list[Tensors]:
    """Return the groups of a batch."""
    rows = zip(*(tensor.unbind(0) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, row, strict=True)) for row in rows]


@ray.remote(num_cpus=0)
class Queue:
    """The queue between producer and consumer."""

    def __init__(self) -> None:
        self._waiting: dict[int, Any] = {}
        self._appended = 0
        self._reserved = 0

    def may_generate(self, groups: int) -> bool:
        """Reserve room for groups, if there is some."""
        if self._reserved >= QUEUE_LIMIT:
            return False
        self._reserved += groups
        return True

    def append(self, batch: Tensors) -> bool:
        """Take a batch."""
        self._waiting[self._appended] = batch
        self._appended += 1
        return True

    def get(self, number: int) -> Tensors | None:
        """Give a batch away, to its only reader."""
        if number not in self._waiting:
            return None
        batch = self._waiting.pop(number)
        self._reserved -= len(batch["lengths"])
        return copy.deepcopy(batch)


@ray.remote(num_cpus=0)
class Consumer:
    """Takes groups."""

    def __init__(self, queue: ray.actor.ActorHandle):
        self._queue = queue
        self._number = 0
        self.begin(0, False)

    def begin(self, groups: int, check: bool) -> None:
        """Expect a round."""
        self._left, self._check, self._kept, self._at = groups, check, [], 0.0

    def take(self, groups: list[dict]) -> None:
        """Take groups, tensors or arrays."""
        if self._check:
            self._kept += [{name: np.array(value) for name, value in group.items()} for group in groups]
        self._left -= len(groups)
        if self._left == 0:
            self._at = time.monotonic()

    def pull(self) -> None:
        """Take a round's groups from the queue."""
        asked = time.monotonic()
        while self._left > 0:
            batch = ray.get(self._queue.get.remote(self._number))
            if batch is None:
                if time.monotonic() - asked > STALL_SECONDS:
                    raise RuntimeError(f"nothing came for {STALL_SECONDS} s; {self._left} groups are missing")
                time.sleep(PAUSE_SECONDS)
                continue
            self._number += 1
            self.take(unstack(batch))
            asked = time.monotonic()

    def end(self) -> tuple[float, int | None]:
        """Return when the last group was taken, and the checksum of all if it was asked for."""
        if self._left:
            raise RuntimeError(f"{self._left} groups are missing")
        return self._at, checksum(self._kept) if self._check else None


@ray.remote(num_cpus=0)
class Producer:
    """Sends groups."""

    def __init__(self, queue: ray.actor.ActorHandle, consumer: ray.actor.ActorHandle):
        self._queue, self._consumer = queue, consumer
        self._groups: dict[str, list[Arrays]] = {}

    def make(self, shape: str) -> None:
        """Make the groups of a shape beforehand."""
        self._groups[shape] = make_groups(shape, DISTINCT)

    def push(self, way: str, shape: str, groups: int, per_call: int) -> float:
        """Send a round's groups. Return when that began."""
        made = self._groups[shape]
        batches = [
            [made[n % DISTINCT] for n in range(start, min(groups, start + per_call))]
            for start in range(0, groups, per_call)
        ]
        began = time.monotonic()
        if way == "ray-queue":
            for batch in batches:
                while not ray.get(self._queue.may_generate.remote(len(batch))):
                    time.sleep(PAUSE_SECONDS)
                ray.get(self._queue.append.remote(stack(batch)))
            return began
        under_way: list[ray.ObjectRef] = []
        for batch in batches:
            if len(under_way) == IN_FLIGHT:
                _, under_way = ray.wait(under_way, num_returns=1)
            under_way.append(self._consumer.take.remote(batch))
        ray.get(under_way)
        return began


def cpu_seconds() -> float:
    """Return what this process and all below it have used: Ray starts its own below it."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=sys.argv[1],
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},
    )
    queue = Queue.remote()
    consumer = Consumer.remote(queue)
    producer = Producer.remote(queue, consumer)
    made: set[str] = set()
    for line in sys.stdin:
        request = json.loads(line)
        shape = request["shape"]
        if shape not in made:
            ray.get(producer.make.remote(shape))
            made.add(shape)
        ray.get(consumer.begin.remote(request["groups"], request["check"]))
        cpu = cpu_seconds()
        pulling = consumer.pull.remote() if request["way"] == "ray-queue" else None
        began = ray.get(producer.push.remote(request["way"], shape, request["groups"], request["per_call"]))
        if pulling is not None:
            ray.get(pulling)
        ended, check = ray.get(consumer.end.remote())
        answer = {"seconds": ended - began, "cpu": cpu_seconds() - cpu, "checksum": check}
        print(json.dumps(answer), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
