"""NCCL's C functions between threads of one process, on host memory: what a group does without a GPU.

It keeps NCCL's rules: all ranks must come to initialise, every rank calls the same operations in the same order with
the same sizes, and an aborted group refuses. `install` puts it in the place of libnccl.
"""

import ctypes
import itertools
import threading
from dataclasses import dataclass, field

from quartet_common import nccl

OK, INVALID, IN_PROGRESS = 0, 4, 7
SECONDS = 20.0
_FLOAT32_BYTES = 4


@dataclass
class _Group:
    world_size: int
    here: set[int] = field(default_factory=set)
    lock: threading.Condition = field(default_factory=threading.Condition)
    posted: list[tuple[str, bytes]] = field(default_factory=list)
    """What rank 0 called: operation and content."""


@dataclass
class _Rank:
    group: _Group
    rank: int
    calls: int = 0


class FakeNccl:
    """Stands for the loaded library."""

    def __init__(self, version: int = 22703):
        self._version = version
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.groups: dict[bytes, _Group] = {}
        self.ranks: dict[int, _Rank] = {}

    def ncclGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return {INVALID: b"invalid argument"}.get(result, b"no error")

    def ncclGetVersion(self, number) -> int:  # noqa: N802
        number._obj.value = self._version
        return OK

    def ncclGetUniqueId(self, made) -> int:  # noqa: N802
        text = b"group %d" % next(self._numbers)
        ctypes.memmove(ctypes.addressof(made._obj), text.ljust(nccl.UNIQUE_ID_BYTES, b"\0"), nccl.UNIQUE_ID_BYTES)
        return OK

    def ncclCommInitRankConfig(self, handle, world_size: int, identity, rank: int, config) -> int:  # noqa: N802
        assert (config._obj.magic, config._obj.blocking) == (0xCAFEBEEF, 0) and config._obj.size == 24
        with self._lock:
            group = self.groups.setdefault(bytes(identity), _Group(world_size))
            number = next(self._numbers)
            self.ranks[number] = _Rank(group, rank)
            group.here.add(rank)
        handle._obj.value = number
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle, state) -> int:  # noqa: N802
        rank = self.ranks.get(handle.value)
        if rank is None:
            return INVALID
        state._obj.value = OK if len(rank.group.here) == rank.group.world_size else IN_PROGRESS
        return OK

    def ncclAllReduce(self, source, target, count, dtype, operation, handle, stream) -> int:  # noqa: N802
        assert (dtype, operation) == (7, 0)
        return self._operate("sum", target, count.value * _FLOAT32_BYTES, handle)

    def ncclBroadcast(self, source, target, size, dtype, root, handle, stream) -> int:  # noqa: N802
        assert (dtype, root) == (1, 0)
        return self._operate("broadcast", target, size.value, handle)

    def ncclCommAbort(self, handle) -> int:  # noqa: N802
        return OK if self.ranks.pop(handle.value, None) else INVALID

    def _operate(self, name: str, target, size: int, handle) -> int:
        rank = self.ranks.get(handle.value)
        if rank is None:
            return INVALID
        group, index = rank.group, rank.calls
        rank.calls += 1
        with group.lock:
            if rank.rank == 0:
                group.posted.append((name, ctypes.string_at(target.value, size)))
                group.lock.notify_all()
                return OK
            group.lock.wait_for(lambda: len(group.posted) > index, SECONDS)
            if len(group.posted) <= index or (name, size) != (group.posted[index][0], len(group.posted[index][1])):
                return INVALID
            ctypes.memmove(target.value, group.posted[index][1], size)
        return OK


def install(monkeypatch) -> FakeNccl:
    """Have `quartet_common.nccl` use a fake library on a machine that it takes to have a GPU."""
    fake = FakeNccl()
    monkeypatch.setattr(nccl, "_library", lambda: fake)
    monkeypatch.setattr(nccl, "_gpus", lambda: 1)
    return fake


class HostStream:
    """Stands for a CUDA stream where memory is the host's: all is done when it is asked for."""

    handle = 0

    def after_current(self) -> None:
        """Nothing is under way."""

    def record(self) -> "HostStream":
        return self

    def query(self) -> bool:
        return True
