"""Rank 0 leads, the others follow: every collective method of the learner is announced before it is called.

Announcements are bytes broadcast in a Gloo group of their own, so that a long wait for a batch does not run into the
deadline of the training's collectives, nor occupy a GPU. An announcement is one JSON line, then raw bytes.
"""

import json
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quartet.v1 import experience_pb2, rollout_pb2

from quartet_common.log import get_logger
from quartet_trainer.errors import TrainingError
from quartet_trainer.learner.base import Learner

log = get_logger(__name__)

# Workers hear at least an `idle` from a leader that lives; see DistributedLearner.idle.
WORKER_SECONDS = 1800.0


class Announcements:
    """Messages from rank 0 to all other ranks."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WORKER_SECONDS))

    def send(self, command: str, payloads: Sequence[bytes] = (), **arguments: Any) -> None:
        """Rank 0: tell all others. Raises TrainingError if one of them is gone."""
        head = json.dumps({"command": command, "arguments": arguments, "sizes": [len(p) for p in payloads]}).encode()
        message = b"\n".join([head, b"".join(payloads)])
        try:
            dist.broadcast(torch.tensor([len(message)]), 0, group=self._group)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._group)
        except RuntimeError as error:
            raise TrainingError(f"a rank of the training job is lost: {str(error).splitlines()[0]}") from error

    def receive(self) -> tuple[str, list[bytes], dict[str, Any]]:
        """Other ranks: wait for the next; returns command, payloads, arguments. RuntimeError if rank 0 is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._group)
        head, _, rest = bytes(buffer.numpy()).partition(b"\n")
        parsed = json.loads(head)
        payloads, begin = [], 0
        for length in parsed["sizes"]:
            payloads.append(rest[begin : begin + length])
            begin += length
        return parsed["command"], payloads, parsed["arguments"]


class DistributedLearner:
    """The learner of all ranks, as rank 0 uses it: the `Learner` protocol, each collective call announced."""

    def __init__(self, learner: Learner, announcements: Announcements | None):
        """`announcements`: None in a world of one."""
        self._learner = learner
        self._announcements = announcements

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def lora(self) -> rollout_pb2.LoraConfig | None:
        """As Learner.lora: the adapter whose tensors `weights` yields, or None."""
        return getattr(self._learner, "lora", None)

    def check_group(self, group: experience_pb2.GroupTensors) -> None:
        self._learner.check_group(group)

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        if self._announcements is not None:
            self._announcements.send("train_step", [group.SerializeToString() for group in groups])
        return self._learner.train_step(groups)

    def weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """As Learner.weights. Closing it early goes through the rest, as the other ranks do."""
        weights = self._call("weights")
        try:
            for named in weights:  # noqa: UP028 - which would close `weights` with this generator
                yield named
        finally:
            if self._announcements is not None:
                for _ in weights:
                    pass

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return self._call("weight_specs")

    def save(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        self._call("save", folder=folder, state=state, facts=facts)

    def snapshot(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> Callable[[], None]:
        return self._call("snapshot", folder=folder, state=state, facts=facts)

    def load(self, folder: Path) -> dict[str, Any]:
        return self._call("load", folder=folder)

    def export(self, folder: Path) -> None:
        self._call("export", folder=folder)

    def idle(self) -> None:
        """Tell the others, at least every few minutes, that rank 0 is alive and waits."""
        if self._announcements is not None:
            self._announcements.send("idle")

    def stop(self) -> None:
        """Let the others end."""
        if self._announcements is not None:
            self._announcements.send("stop")

    def _call(self, method: str, **arguments: Any) -> Any:
        if self._announcements is not None:
            paths = {name: str(value) for name, value in arguments.items() if isinstance(value, Path)}
            self._announcements.send(method, **{**arguments, **paths})
        return getattr(self._learner, method)(**arguments)


def worker_loop(learner: Learner, announcements: Announcements) -> None:
    """Ranks above 0: call what rank 0 announces, until it says stop. Raises RuntimeError if rank 0 is gone."""
    with ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint") as executor:
        while True:
            command, payloads, arguments = announcements.receive()
            if "folder" in arguments:
                arguments["folder"] = Path(arguments["folder"])
            if command == "train_step":
                learner.train_step([experience_pb2.GroupTensors.FromString(payload) for payload in payloads])
            elif command == "weights":
                for _ in learner.weights():
                    pass
            elif command == "snapshot":
                write = learner.snapshot(**arguments)
                executor.submit(write)  # whether it failed rank 0 hears from the writing itself
            elif command in ("weight_specs", "save", "load", "export"):
                getattr(learner, command)(**arguments)
            elif command == "stop":
                log.info("rank 0 has ended the training")
                return
            elif command != "idle":
                raise ValueError(f"rank 0 announced '{command}', which this rank does not know")
