"""The ranks of one training job: those that torchrun started, or a single process."""

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
"""Errors whose text suffices to say what has failed."""
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
        """Whether this is rank 0, which writes files and makes gRPC calls."""
        return self.rank == 0


def initialize(seed: int) -> Ranks:
    """Launch ColossalAI, which creates the default process group (NCCL with CUDA, else Gloo), unless there is one.

    The ranks are those of torchrun's environment variables; without these, this process alone.

    Raises:
        TrainingError: a rank is lost meanwhile.
    """
    colossalai_patches.apply()
    import colossalai
    from colossalai.utils import get_current_device

    if not dist.is_initialized():
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        place = os.environ if "RANK" in os.environ and "WORLD_SIZE" in os.environ else single
        with _forming():
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


@contextmanager
def _forming() -> Iterator[None]:
    """Create a process group in the block, which connects all ranks. Raises TrainingError if one of them is lost."""
    try:
        yield
    except RuntimeError as error:  # of torch's store or of Gloo
        came = str(error).splitlines()[0]
        raise TrainingError(f"the ranks' process group failed to form: {came}; each rank's log says why") from error


_left_groups: list[dist.ProcessGroup] = []


def shutdown() -> None:
    """Destroy the default process group, if there is one. Use this instead of torch's own function.

    DDP's reducer holds a reference to the group. If that were the last one, the group's destructor (torch 2.13) would
    join Gloo's threads while holding the GIL, which such a thread may need to free the last collective's tensor: a
    deadlock. So a reference is kept here, and Gloo's threads keep running. Such a process must exit by
    `launch.leave_process`: torch aborts if the interpreter shuts down beside these threads.
    """
    if dist.is_initialized():
        _left_groups.append(dist.group.WORLD)
        dist.destroy_process_group()


@contextmanager
def in_turn(ranks: Ranks) -> Iterator[None]:
    """Run the block on the ranks of a host one after another; hosts run in parallel. All ranks call."""
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
    """Return the sum of `values` over all ranks, a new tensor."""
    total = values.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def sum_and_max(sums: Tensor, peaks: Tensor) -> None:
    """In place: reduce `sums` to their sum, and `peaks` to their maximum, over all ranks."""
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)


WORKER_SECONDS = 1800.0
"""Timeout of the other ranks' wait for an announcement; `Learner.idle` keeps within it."""


class Announcements:
    """Messages from rank 0 to all other ranks: one JSON line, then raw bytes.

    They have a Gloo group of their own, so that a long wait for a batch neither runs into the timeout of the
    training's collectives nor occupies a GPU.
    """

    def __init__(self) -> None:
        """All ranks call. Raises TrainingError if one of them is lost."""
        with _forming():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WORKER_SECONDS))

    def send(self, command: str, payloads: Sequence[bytes] = (), **arguments: Any) -> None:
        """On rank 0: send to all other ranks. Raises TrainingError if one of them is lost."""
        head = json.dumps({"command": command, "arguments": arguments, "sizes": [len(p) for p in payloads]}).encode()
        message = b"\n".join([head, b"".join(payloads)])
        try:
            dist.broadcast(torch.tensor([len(message)]), 0, group=self._group)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._group)
        except RuntimeError as error:
            raise TrainingError(f"a rank of the training job is lost: {str(error).splitlines()[0]}") from error

    def receive(self) -> tuple[str, list[bytes], dict[str, Any]]:
        """On other ranks: wait for the next command, payloads and arguments. Raises TrainingError if rank 0 is lost."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.broadcast(size, 0, group=self._group)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self._group)
        except RuntimeError as error:
            raise TrainingError(f"rank 0 of the training job is lost: {str(error).splitlines()[0]}") from error
        head, _, rest = bytes(buffer.numpy()).partition(b"\n")
        parsed = json.loads(head)
        payloads, begin = [], 0
        for length in parsed["sizes"]:
            payloads.append(rest[begin : begin + length])
            begin += length
        return parsed["command"], payloads, parsed["arguments"]


class WritingRanks:
    """Ranks that write one folder together. They have their own process group, so a rank may write in any thread."""

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
        """Write `folder` atomically: every rank writes its `share`, then rank 0 the `rest`.

        `manifest`: see `atomic_folder`; None for an exported model.

        Raises:
            LearnerError: a rank failed; raised on every rank.
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
        started = False
        try:
            with atomic_folder(folder, manifest) as writing:
                started = bool(self._exchange(str(writing)))
                failures = self._exchange(_failure(share, writing))
                if failed := next(filter(None, failures), ""):
                    raise OSError(failed)
                rest(writing)
        except Exception as error:  # the other ranks wait, whatever it is
            if not started:
                self._exchange("")
            self._exchange(_reason(error))
            raise LearnerError(f"could not {what}: {_reason(error)}") from error
        self._exchange("")

    def _exchange(self, text: str) -> list[str]:
        """Gather every rank's text, in the order of ranks."""
        if self._group is None:
            return [text]
        # Surrogates: a file name that is not UTF-8 has them. Raising here would leave the other ranks waiting.
        mine = torch.frombuffer(bytearray(text.encode(errors="surrogatepass") or b" "), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks.world_size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = int(max(lengths))
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(padded, nn.functional.pad(mine, (0, longest - mine.numel()), value=32), group=self._group)
        return [bytes(one.numpy()).decode(errors="surrogatepass").rstrip(" ") for one in padded]


def _failure(share: Callable[[Path], None], writing: Path) -> str:
    try:
        share(writing)
    except Exception as error:  # the other ranks wait, whatever it is
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    return (str(error) if isinstance(error, WRITE_ERRORS) else "") or repr(error)
