"""The process group of a weight group's epoch: torch's, over Gloo or NCCL, outside torch's default group.

Rank 0 is the trainer. A group has its own store and connections, so that it can be created and destroyed repeatedly
beside a library's default group. Neither is encrypted or authenticated: each rank listens on one address only, of a
trusted network.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

LOOK_SECONDS = 0.0005

ResultT = TypeVar("ResultT")


def device_of(backend: str) -> torch.device:
    """Return the device of the tensors in a backend's operations."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def nccl_missing() -> str:
    """Return why NCCL cannot be used in this process, in one sentence; "" if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU on this machine: use the transport gloo or file"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL: use the transport gloo or file"
    return ""


def nccl_version() -> str:
    """Return the version of torch's NCCL, e.g. "2.29.7"."""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def epoch_store(host: str, port: int, epoch: int, secret: bytes, seconds: float) -> dist.Store:
    """Connect with the store at host:port, and return an epoch's part of it, whose operations take at most `seconds`.

    Its keys contain the secret, so only invited processes can name them. A blocking wait blocks the connection, so each
    group has its own. Raises RuntimeError, at once if connections are refused.
    """
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
    return dist.PrefixStore(f"quartet/{epoch}/{secret.hex()}", store)


def first_line(error: BaseException, secret: bytes = b"") -> str:
    """Return the first line of a torch error, without its C++ stack trace and without `secret`, which is in keys."""
    line = str(error).partition("\n")[0]
    return line.replace(secret.hex(), "…") if secret else line


def start_thread(name: str, function: Callable[[], ResultT]) -> Future[ResultT]:
    """Return the future of a call on a daemon thread, which the caller may abandon: a collective is not interrupted."""
    call: Future[ResultT] = Future()

    def run() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return call


class GroupError(RuntimeError):
    """An operation of a group failed."""


@contextlib.contextmanager
def _raising_group_error() -> Iterator[None]:
    """Turn torch's RuntimeError into GroupError."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(first_line(error)) from error


class ProcessGroup:
    """One rank of a connected group."""

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
        """Connect with the other ranks; blocks.

        Args:
            backend: "gloo" or "nccl".
            seconds: deadline of the rendezvous and, unless `broadcast` is given one, of each operation.
            host: name or address at which the other ranks reach this one. Gloo listens there; NCCL chooses an
                interface itself, unless `interface` is set.
            interface: network interface to listen on instead of `host`; default: the environment's
                `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`, if set.

        Raises:
            RuntimeError: the rendezvous failed.
        """
        self.device, self._seconds = device_of(backend), seconds
        if backend == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # As in vLLM: ranks must agree.
            if interface:
                os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # NCCL reads it once per process.
            torch.cuda.set_device(self.device)  # In this thread.
            options = dist.ProcessGroupNCCL.Options()
        else:
            options = dist.ProcessGroupGloo._Options()
            interface = interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
            # Without either, Gloo listens on the address that the machine's hostname resolves to.
            where = {"interface": interface} if interface else {"hostname": host}
            options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        options._timeout = timedelta(seconds=seconds)
        kind = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        self._group: Any = kind(store, rank, world_size, options)
        if backend == "nccl":  # It connects in the first operation.
            first = torch.zeros(1, device=self.device)
            self._end(first, self._group.allreduce([first]), time.monotonic() + seconds, lambda: None)

    def broadcast(
        self,
        tensors: Iterable[torch.Tensor],
        deadline: float | None = None,
        ahead: int = 1,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[torch.Tensor]:
        """Broadcast tensors of `device` from rank 0, in place; yield each when its broadcast has ended.

        Args:
            deadline: of all (`time.monotonic`); default: each has the group's `seconds`.
            ahead: how many are under way at a time; the next is taken when the oldest has ended.
            check: called repeatedly while waiting.

        Raises:
            GroupError: a broadcast failed, or did not end in time.
        """
        under_way: deque[tuple[torch.Tensor, Any, float]] = deque()
        for tensor in tensors:
            end = deadline or time.monotonic() + self._seconds
            under_way.append((tensor, self._begin(tensor, end), end))
            if len(under_way) == ahead:
                yield self._end(*under_way.popleft(), check)
        while under_way:
            yield self._end(*under_way.popleft(), check)

    def _begin(self, tensor: torch.Tensor, deadline: float) -> Any:
        if self._group is None:
            raise GroupError("the weight group was left")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        with _raising_group_error():
            return self._group.broadcast([tensor], options)

    def _end(self, tensor: torch.Tensor, work: Any, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """Wait for `work` on a tensor; return that."""
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise GroupError("an operation of the weight group did not end in time")
            time.sleep(LOOK_SECONDS)
        with _raising_group_error():
            work.wait()
        return tensor

    def close(self, seconds: float = 0.0) -> None:
        """Leave the group, abort pending operations, and wait at most `seconds` for their end."""
        holder, self._group = [self._group], None
        if holder[0] is not None:
            thread = threading.Thread(target=_destroy, args=(holder,), name="drop-weight-group", daemon=True)
            thread.start()
            thread.join(seconds)


def _destroy(holder: list[Any]) -> None:
    """Abort, and drop the last reference, which only `holder` has: its destructor waits for pending operations."""
    with contextlib.suppress(RuntimeError):
        holder[0].abort()
    holder.clear()
