"""A weight group's rank 0 and members, each in a process: broadcasts, and epochs whose member is killed or stopped.

Runs in the trainer's environment: `group.py gloo|nccl MEGABYTES` prints a JSON object. With NCCL each rank has a GPU.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist

from quartet_weights.process_group import ProcessGroup, epoch_store

HOST, SECRET = "127.0.0.1", bytes(16)
MEETING_SECONDS, LOSS_SECONDS = 60.0, 5.0
FIRST = 7  # value of the tensor's bytes
LOST = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
FORKS = multiprocessing.get_context("fork")


def join(backend: str, port: int, epoch: int, rank: int) -> ProcessGroup:
    store = epoch_store(HOST, port, epoch, SECRET, MEETING_SECONDS)
    return ProcessGroup(backend, store, rank, 2, MEETING_SECONDS, HOST)


def take_part(leader: Connection, backend: str, epoch: int, megabytes: int) -> None:
    """Act as rank 1 of an epoch: receive one broadcast, and report whether it is complete."""
    port = leader.recv()
    if backend == "nccl":
        torch.cuda.set_device(1)
    group = join(backend, port, epoch, rank=1)
    tensor = torch.zeros(megabytes << 20, dtype=torch.uint8, device=group.device)
    leader.send("met")
    leader.recv()  # wait for rank 0
    list(group.broadcast([tensor], time.monotonic() + MEETING_SECONDS))
    leader.send(bool((tensor == FIRST).all()))


class Epoch:
    """A group of this process and one member, which is forked immediately, before CUDA is initialized."""

    def __init__(self, backend: str, number: int, megabytes: int):
        self._backend, self._number, self._megabytes = backend, number, megabytes
        self._connection, other = FORKS.Pipe()
        self._member = FORKS.Process(target=take_part, args=(other, backend, number, megabytes), daemon=True)
        self._member.start()
        other.close()

    def meet(self, port: int) -> "Epoch":
        self._connection.send(port)
        self._group = join(self._backend, port, self._number, rank=0)
        assert self._connection.recv() == "met"
        self._tensor = torch.full((self._megabytes << 20,), FIRST, dtype=torch.uint8, device=self._group.device)
        return self

    def __enter__(self) -> "Epoch":
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close(1.0)
        self._member.kill()
        self._member.join()

    def broadcast(self, seconds: float) -> float:
        """Broadcast once; return the seconds. Raises RuntimeError."""
        began = time.monotonic()
        list(self._group.broadcast([self._tensor], began + seconds))
        if self._tensor.is_cuda:
            torch.cuda.synchronize()
        return time.monotonic() - began

    def deliver(self) -> float:
        """Broadcast to the member; return GB/s. Raises AssertionError if the data differ."""
        self._connection.send("go")
        seconds = self.broadcast(MEETING_SECONDS)
        assert self._connection.recv() is True, "the received data differ from those sent"
        return self._megabytes / 1024 / seconds

    def lose(self, number: int) -> float:
        """Send the member a signal; return the seconds until a broadcast fails. Raises AssertionError."""
        os.kill(self._member.pid, number)
        began = time.monotonic()
        try:
            self.broadcast(LOSS_SECONDS)
        except RuntimeError:
            return time.monotonic() - began
        raise AssertionError(f"a broadcast to a member that got signal {number} succeeded")


def lead(backend: str, megabytes: int) -> dict[str, float]:
    """Act as rank 0 of four epochs; return rates, and the seconds until the loss of a member was noticed."""
    epochs = iter([Epoch(backend, number, megabytes) for number in range(1, 5)])
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    measured: dict[str, float] = {}
    with next(epochs).meet(store.port) as epoch:
        measured["gb_per_second"] = epoch.deliver()
    for word, lost in LOST.items():
        with next(epochs).meet(store.port) as epoch:
            measured[f"{word}_noticed_seconds"] = epoch.lose(lost)
    with next(epochs).meet(store.port) as epoch:
        measured["again_gb_per_second"] = epoch.deliver()
    return {name: round(value, 3) for name, value in measured.items()}


if __name__ == "__main__":
    print(json.dumps(lead(sys.argv[1], int(sys.argv[2]))), flush=True)
