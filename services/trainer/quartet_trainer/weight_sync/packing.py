"""Packs tensors into buckets: through a few reused buffers, or as a copy of all of them."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from itertools import groupby

import torch
from quartet.v1 import rollout_pb2

from quartet_weights.buckets import BackgroundChecksum, torch_dtype

BUFFERS = 4
"""One is filled while the others are sent and checksummed."""

Weights = Callable[[], Generator[tuple[str, torch.Tensor], None, None]]
"""Returns the tensors of a manifest by name, in its order; the packer exhausts or closes the generator."""


class Packer:
    """Fills the buckets of a manifest and computes their checksums on a thread.

    Buffers are allocated once, because allocating fresh pages costs more than the copy.
    """

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None, copy: bool = False):
        """Allocate nothing yet; `pack` does.

        Args:
            device: of the buckets; default: the CPU.
            copy: keep all buckets in memory, instead of `BUFFERS` of them.
        """
        self.manifest = manifest
        self._device = device or torch.device("cpu")
        self._pinned = not copy and self._device.type == "cpu" and torch.cuda.is_available()
        self._count = len(manifest.bucket_bytes) if copy else min(BUFFERS, len(manifest.bucket_bytes))
        self._buffers: list[torch.Tensor] = []
        self._checksum = BackgroundChecksum()
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None

    def pack(self, weights: Weights) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 [bucket_bytes], in order. Without `copy`, the `BUFFERS`-th after it overwrites it.

        Raises:
            ValueError: the weights are not those of the manifest; the message names the tensor.
        """
        sizes, count = self.manifest.bucket_bytes, self._count
        if not self._buffers:
            self._buffers = [
                torch.zeros(max(sizes[buffer::count]), dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
                for buffer in range(count)  # a large tensor, in a bucket of its own, enlarges one
            ]
        last, self._checksum = self._checksum, BackgroundChecksum(self._stream)
        last.values()  # wait: its thread may still be reading the buffers
        reads: list[Future[int]] = []
        with closing(weights()) as tensors:
            for index, planned in groupby(self.manifest.tensors, key=lambda tensor: tensor.bucket):
                if index >= count:
                    reads[index - count].result()
                bucket = self._buffers[index % count][: sizes[index]]
                _fill(bucket, planned, tensors)
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                reads.append(self._checksum.add(bucket))
                yield bucket

    def beside_training(self) -> torch.cuda.StreamContext:
        """Return a context in which a thread's GPU work goes to a stream that waits for the packed buckets and for no
        other work of the training."""
        return torch.cuda.stream(self._stream)

    def checksums(self) -> list[int]:
        """Wait for the checksums of the last `pack`: each covers all bytes up to the end of its bucket."""
        return self._checksum.values()


def _fill(
    bucket: torch.Tensor, planned: Iterable[rollout_pb2.WeightTensor], weights: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Copy the next tensors, which must be those planned, into their bucket. Padding, which is part of the checksum, is
    zeroed."""
    end = 0
    for expected in planned:
        name, tensor = next(weights, ("", None))
        if tensor is None or name != expected.name:
            raise ValueError(f"weights: got '{name}' where '{expected.name}' was announced")
        if tensor.dtype != torch_dtype(expected) or list(tensor.shape) != list(expected.shape):
            raise ValueError(f"weights: '{name}' is {tensor.dtype} {list(tensor.shape)}, not as announced")
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        bucket[end : expected.offset].zero_()
        end = expected.offset + len(data)
        bucket[expected.offset : end].copy_(data)
    bucket[end:].zero_()
