"""The ranks of one training job: started by torchrun, or a single process by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from quartet_trainer.checkpoints import atomic_folder
from quartet_trainer.errors import LearnerError, TrainingError
from quartet_trainer.learner import colossalai_patches

WRITE_ERRORS = (OSError, TypeError, ValueError, RuntimeError, SafetensorError)
WRITING_TIME = timedelta(minutes=30)
"""How long a rank that has written its share waits for the slowest."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0, which writes files and talks gRPC."""
        return self.rank == 0


def initialize(seed: int) -> Ranks:
    """Launch ColossalAI, which owns the default process group (NCCL with CUDA, else Gloo). Again only answers.

    torchrun's environment variables say how many ranks there are; without them this process is the only one.
    """
    colossalai_patches.apply()
    import colossalai
    from colossalai.utils import get_current_device

    if not dist.is_initialized():
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        place = os.environ if "RANK" in os.environ and "WORLD_SIZE" in os.environ else alone
        colossalai.launch(
            rank=int(place["RANK"]),
            local_rank=int(place.get("LOCAL_RANK", place["RANK"])),
            world_size=int(place["WORLD_SIZE"]),
            host=place["MASTER_ADDR"],
            port=int(place["MASTER_PORT"]),
            seed=seed,
            verbose=False,
        )
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device(get_current_device()))


_left_groups: list[dist.ProcessGroup] = []


def shutdown() -> None:
    """Leave the default process group, if this process is in it. Leave it here, not by torch's function alone.

    DDP's reducer refers to the group too. Were its reference the last, its destructor (torch 2.13) would wait for
    Gloo's threads while holding the interpreter's lock, which such a thread may be waiting for to free the tensor of
    the last collective: the process would never end. So a reference of our own is kept, and with it Gloo's threads:
    a process that was in a group ends by `launch.leave_process`, for torch aborts one that is taken down around them.
    """
    if dist.is_initialized():
        _left_groups.append(dist.group.WORLD)
        dist.destroy_process_group()


@contextmanager
def in_turn(ranks: Ranks) -> Iterator[None]:
    """The ranks of a host go through the block one after another, those of several hosts side by side. All call."""
    if ranks.world_size == 1:
        yield
        return
    place = int(os.environ.get("LOCAL_RANK", ranks.rank))
    for _ in range(place):
        dist.barrier()
    yield
    for _ in range(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) - place):
        dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """A new tensor: the sum of `values` over all ranks."""
    total = values.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def sum_and_max(sums: Tensor, peaks: Tensor) -> None:
    """Replace both by their sum, and maximum, over all ranks."""
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)


WORKER_SECONDS = 1800.0
"""Within which the other ranks hear of a leader that lives, at least that it is idle."""


class Announcements:
    """Messages from rank 0 to all other ranks: one JSON line, then raw bytes.

    They go in a Gloo group of their own, so that a long wait for a batch does not run into the deadline of the
    training's collectives, nor occupy a GPU.
    """

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


class WritingRanks:
    """Ranks that write one folder together, each in a thread of its own if it likes: they talk in a group apart."""

    def __init__(self, ranks: Ranks) -> None:
        """All ranks call."""
        self._ranks = ranks
        self._group = dist.new_group(backend="gloo", timeout=WRITING_TIME) if ranks.world_size > 1 else None

    def write(
        self,
        folder: Path,
        manifest: dict[str, Any] | None,
        share: Callable[[Path], None],
        rest: Callable[[Path], None] = lambda writing: None,
    ) -> None:
        """Have every rank write its `share` of `folder`, and rank 0 the `rest`; it is there whole, or not at all.

        `manifest`: of a checkpoint, see `atomic_folder`; None: it is an exported model.

        Raises:
            LearnerError: a rank could not; on every rank.
        """
        what = f"write the model {folder}" if manifest is None else f"write the checkpoint {folder}"
        if not self._ranks.is_first:
            place = self._exchange("")[0]
            error = _failure(share, Path(place)) if place else ""
            if place:
                self._exchange(error)
            failed = self._exchange(error)[0]
            if failed:
                raise LearnerError(f"could not {what}: {failed}")
            return
        told = False
        try:
            with atomic_folder(folder, manifest) as writing:
                told = bool(self._exchange(str(writing)))
                failures = self._exchange(_failure(share, writing))
                if failed := next(filter(None, failures), ""):
                    raise OSError(failed)
                rest(writing)
        except WRITE_ERRORS as error:
            if not told:
                self._exchange("")
            self._exchange(str(error) or repr(error))
            raise LearnerError(f"could not {what}: {error}") from error
        self._exchange("")

    def _exchange(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self._group is None:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks.world_size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = int(max(lengths))
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(padded, nn.functional.pad(mine, (0, longest - mine.numel()), value=32), group=self._group)
        return [bytes(one.numpy()).decode().rstrip(" ") for one in padded]


def _failure(share: Callable[[Path], None], writing: Path) -> str:
    try:
        share(writing)
    except WRITE_ERRORS as error:
        return str(error) or repr(error)
    return ""
