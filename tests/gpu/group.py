"""A weight group's rank 0 and its members, each in a process: a broadcast, members that die or hang, epochs after them.

Runs in the trainer's environment: `group.py gloo|nccl MEGABYTES` prints a JSON object. Over NCCL each rank has a GPU.
"""

import json
import signal
import subprocess
import sys
import time

import torch
from torch import distributed as dist

from quartet_weights.process_group import ProcessGroup, epoch_store

HOST, SECRET = "127.0.0.1", bytes(16)
MEETING_SECONDS, LOSS_SECONDS = 60.0, 5.0
FIRST = 7  # value of the tensor's bytes


def take_part(backend: str, port: int, epoch: int, megabytes: int) -> None:
    """Be rank 1 of an epoch: receive once what rank 0 sends, and say whether it came whole."""
    if backend == "nccl":
        torch.cuda.set_device(1)
    store = epoch_store(dist.TCPStore(HOST, port, is_master=False), epoch, SECRET)
    group = ProcessGroup(backend, store, 1, 2, MEETING_SECONDS, HOST)
    tensor = torch.zeros(megabytes << 20, dtype=torch.uint8, device=group.device)
    print("met", flush=True)
    sys.stdin.readline()  # until rank 0 lets it
    group.broadcast(tensor, time.monotonic() + MEETING_SECONDS)(lambda: None)
    print(bool((tensor == FIRST).all()), flush=True)


class Epoch:
    """A group of this process and one member, as long as the context."""

    def __init__(self, backend: str, store: dist.TCPStore, number: int, megabytes: int):
        command = [sys.executable, __file__, backend, str(megabytes), str(store.port), str(number)]
        self.member = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        own = epoch_store(dist.TCPStore(HOST, store.port, is_master=False), number, SECRET)
        self.group = ProcessGroup(backend, own, 0, 2, MEETING_SECONDS, HOST)
        assert self.member.stdout.readline() == "met\n", "the member did not meet rank 0"
        self._tensor = torch.full((megabytes << 20,), FIRST, dtype=torch.uint8, device=self.group.device)

    def __enter__(self) -> "Epoch":
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close(1.0)
        self.member.kill()
        self.member.wait()

    def broadcast(self, seconds: float) -> float:
        """Send once; return the seconds. Raises RuntimeError."""
        began = time.monotonic()
        self.group.broadcast(self._tensor, began + seconds)(lambda: None)
        if self._tensor.is_cuda:
            torch.cuda.synchronize()
        return time.monotonic() - began

    def deliver(self) -> float:
        """Send to a member that receives; return the seconds. Raises AssertionError if it came not whole."""
        self.member.stdin.write("go\n")
        self.member.stdin.flush()
        seconds = self.broadcast(MEETING_SECONDS)
        assert self.member.stdout.readline() == "True\n", "what came is not what was sent"
        return seconds


def lead(backend: str, megabytes: int) -> dict[str, float]:
    """Be rank 0 of four epochs; return rates, and how soon a lost member was noticed."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    measured: dict[str, float] = {}
    with Epoch(backend, store, 1, megabytes) as epoch:
        measured["gb_per_second"] = megabytes / 1024 / epoch.deliver()
    for number, (word, lost) in enumerate({"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.items(), start=2):
        with Epoch(backend, store, number, megabytes) as epoch:
            epoch.member.send_signal(lost)
            began = time.monotonic()
            try:
                epoch.broadcast(LOSS_SECONDS)
            except RuntimeError:
                measured[f"{word}_noticed_seconds"] = time.monotonic() - began
            else:
                raise AssertionError(f"a broadcast to a member that was {word} ended as if it had come")
    with Epoch(backend, store, 4, megabytes) as epoch:
        measured["again_gb_per_second"] = megabytes / 1024 / epoch.deliver()
    return {name: round(value, 3) for name, value in measured.items()}


if __name__ == "__main__":
    if len(sys.argv) > 3:
        take_part(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[2]))
    else:
        print(json.dumps(lead(sys.argv[1], int(sys.argv[2]))), flush=True)
