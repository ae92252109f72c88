"""Weights from the rollout's process to those that compute: memory that both map.

A memfd has no name that could be left behind by a process that is killed, and is not bounded by the size of /dev/shm.
Processes of the same user open it through /proc.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from quartet_rollout.engines.base import EngineError

_ALIGNMENT = 64
_STEP = 1 << 20


class Arena:
    """Memory for one set of weights at a time, kept for the next: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._size = 0
        self._file = -1
        self._bytes: torch.Tensor | None = None

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Copy tensors in, from wherever they are; return what tells another process where to find them.

        Raises EngineError when the machine has no such memory.
        """
        entries: list[tuple[str, str, list[int], int]] = []
        offset = 0
        for name, tensor in tensors:
            end = offset + tensor.numel() * tensor.element_size()
            if self._bytes is None or end > self._size:
                self._bytes = self._grow(end)
            self._bytes[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": self._size, "entries": entries}

    def close(self) -> None:
        """Give the memory back, as soon as nobody maps it any more."""
        self._bytes, self._size = None, 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _grow(self, least: int) -> torch.Tensor:
        """Map more of the same memory: what is in it stays."""
        size = -(-max(least, self._size + self._size // 4) // _STEP) * _STEP
        if self._file < 0:
            self._file = os.memfd_create("quartet-weights")
        try:
            os.posix_fallocate(self._file, 0, size)  # An error now, not a signal when it is written to.
        except OSError as error:
            raise EngineError(f"no {size} bytes of shared memory for weights: {error.strerror}") from error
        self._size = size
        return torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)


def tensors_in(place: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """What `Arena.put` told of, in another process. The tensors are valid until the next `put`."""
    memory = torch.from_file(place["path"], shared=True, size=place["size"], dtype=torch.uint8)
    for name, dtype, shape, offset in place["entries"]:
        kind: torch.dtype = getattr(torch, dtype)
        yield name, memory[offset : offset + prod(shape) * kind.itemsize].view(kind).view(shape)
