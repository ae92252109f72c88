"""The process group of a weight group's epoch: torch's, over Gloo or NCCL, outside torch's default group.

Rank 0 is the trainer. A group has a store and connections of its own, so that it is made and dropped any number of
times beside whatever default group a library has. Neither is encrypted or authenticated: each rank listens at one
address alone, of a network that is trusted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOK_SECONDS = 0.0005


def device_of(backend: str) -> torch.device:
    """Where the tensors of a backend's operations are."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def nccl_missing() -> str:
    """Return why NCCL cannot be used in this process, in one sentence, or nothing."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU on this machine: use the transport gloo or file"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL: use the transport gloo or file"
    return ""


def nccl_version() -> str:
    """Return the version of torch's NCCL, e.g. "2.29.7"."""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that the route to another begins at. Nothing is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def epoch_store(store: dist.Store, epoch: int, secret: bytes) -> dist.Store:
    """Return an epoch's part of a store. Who was not invited cannot name its keys."""
    return dist.PrefixStore(f"quartet/{epoch}/{secret.hex()}", store)


def first_line(error: BaseException, secret: bytes = b"") -> str:
    """The first line of an error of torch, which adds C++ stack traces, without `secret`, which is part of keys."""
    line = str(error).partition("\n")[0]
    return line.replace(secret.hex(), "…") if secret else line


class ProcessGroup:
    """One rank of a group that has met."""

    def __init__(
        self,
        backend: str,
        store: dist.Store,
        rank: int,
        world_size: int,
        seconds: float,
        host: str,
        interface: str = "",
    ) -> None:
        """Meet the other ranks; blocks.

        Args:
            backend: "gloo" or "nccl".
            seconds: deadline of the meeting and of each operation.
            host: name or address at which the other ranks reach this one. Gloo listens there; NCCL chooses an
                interface itself, unless one is named.
            interface: network interface to listen at instead of `host`; default: the environment's
                `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`, if it is set.

        Raises:
            RuntimeError: not all ranks met.
        """
        self.device = device_of(backend)
        timeout = timedelta(seconds=seconds)
        if backend == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # vLLM runs without, and ranks must agree.
            if interface:
                os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # Read once in a process.
            torch.cuda.set_device(self.device)  # Of this thread.
            options = dist.ProcessGroupNCCL.Options()
        else:
            options = dist.ProcessGroupGloo._Options()
            interface = interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
            # torch has only these names for where Gloo listens, which is else what the host's name resolves to.
            where = {"interface": interface} if interface else {"hostname": host}
            options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        options._timeout = timeout
        kind = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        self._group: Any = kind(store, rank, world_size, options)
        if backend == "nccl":  # It connects with the first operation.
            work = self._group.allreduce([torch.zeros(1, device=self.device)])
            self._wait(work, time.monotonic() + seconds, lambda: None)

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> Callable[[Callable[[], None]], None]:
        """Begin to broadcast from rank 0, in place. Returns a function that waits for the end, at most until `deadline`
        (`time.monotonic`), calls its argument meanwhile, and raises RuntimeError."""
        if self._group is None:
            raise RuntimeError("the weight group was left")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        work = self._group.broadcast([tensor], options)
        return lambda check: self._wait(work, deadline, check)

    def _wait(self, work: Any, deadline: float, check: Callable[[], None]) -> None:
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise RuntimeError("an operation of the weight group did not end in time")
            time.sleep(LOOK_SECONDS)
        work.wait()

    def close(self, seconds: float = 0.0) -> None:
        """Leave, giving up what is under way. Waits so many seconds at most for that."""
        holder, self._group = [self._group], None
        if holder[0] is not None:
            thread = threading.Thread(target=_destroy, args=(holder,), name="drop-weight-group", daemon=True)
            thread.start()
            thread.join(seconds)


def _destroy(holder: list[Any]) -> None:
    """Release the last reference, which is in `holder` alone: who does that waits for operations under way."""
    with contextlib.suppress(RuntimeError):  # An error of what is thrown away says nothing.
        holder[0].abort()
    holder.clear()
