"""Packs tensors into buckets: through a few reused buffers, or as a copy of all of them."""

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial

import torch
from quartet.v1 import rollout_pb2

from quartet_common.weights import BackgroundChecksum
from quartet_weights.buckets import torch_dtype

BUFFERS = 4
"""One is filled while the others are sent and checksummed."""

Weights = Callable[[], Generator[tuple[str, torch.Tensor], None, None]]
"""Returns the tensors of a manifest by name, in its order; the caller exhausts or closes the generator."""


class Packer:
    """Fills the buckets of a manifest and computes their checksums on a thread.

    Buffers are allocated once, because allocating fresh pages costs more than the copy.
    """

    def __init__(
        self,
        manifest: rollout_pb2.WeightManifest,
        device: torch.device | None = None,
        buffers: int = BUFFERS,
        pinned: bool = True,
    ):
        """Allocate nothing yet; `pack` does.

        Args:
            device: of the buckets; default: the CPU.
            buffers: how many buckets are in memory at a time.
            pinned: use pinned host memory for buckets on the CPU, if there is a GPU.
        """
        self.manifest = manifest
        self._device = device or torch.device("cpu")
        self._pinned = pinned and self._device.type == "cpu" and torch.cuda.is_available()
        self._count = min(buffers, len(manifest.bucket_bytes))
        self._buffers: list[torch.Tensor] = []
        self._checksum = BackgroundChecksum()
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None

    def pack(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 [bucket_bytes], in order. The `buffers`-th bucket after it overwrites it.

        Raises:
            ValueError: the weights are not those of the manifest; the message names the tensor.
        """
        sizes, tensors, count = self.manifest.bucket_bytes, iter(self.manifest.tensors), self._count
        if not self._buffers:
            self._buffers = [
                torch.zeros(max(sizes[buffer::count]), dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
                for buffer in range(count)  # a large tensor, in a bucket of its own, enlarges one
            ]
        last, self._checksum = self._checksum, BackgroundChecksum()
        last.values()  # wait: its thread may still be reading the buffers
        reads: list[Future[int]] = []
        planned = next(tensors, None)
        for index, size in enumerate(sizes):
            if index >= count:
                reads[index - count].result()
            bucket, end = self._buffers[index % count][:size], 0
            while planned is not None and planned.bucket == index:
                name, tensor = next(weights, ("", None))
                if tensor is None or name != planned.name:
                    raise ValueError(f"weights: got '{name}' where '{planned.name}' was announced")
                if tensor.dtype != torch_dtype(planned) or list(tensor.shape) != list(planned.shape):
                    raise ValueError(f"weights: '{name}' is {tensor.dtype} {list(tensor.shape)}, not as announced")
                data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
                bucket[end : planned.offset].zero_()  # padding is part of the checksum
                end = planned.offset + math.prod(data.shape)
                bucket[planned.offset : end].copy_(data)
                planned = next(tensors, None)
            bucket[end:].zero_()
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            reads.append(self._checksum.add(partial(self._bytes, bucket)))
            yield bucket

    def beside_training(self) -> torch.cuda.StreamContext:
        """Return a context in which a thread's GPU work goes to a stream that waits for the packed buckets and for no
        other work of the training."""
        return torch.cuda.stream(self._stream)

    def _bytes(self, bucket: torch.Tensor) -> memoryview:
        with self.beside_training():
            return memoryview(bucket.cpu().numpy())

    def checksums(self) -> list[int]:
        """Wait for the checksums of the last `pack`: each covers all bytes up to the end of its bucket."""
        return self._checksum.values()


class Snapshot(Packer):
    """A copy of the weights of one version: all buckets, packed, and their checksums.

    It is taken before an update begins, so that the update itself only broadcasts. Retries and rollouts that join later
    are served from it too.
    """

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None):
        """`device`: of the copy; default: the CPU."""
        super().__init__(manifest, device, buffers=len(manifest.bucket_bytes), pinned=False)
        self.version = -1
        self.buckets: list[torch.Tensor] = []
        """uint8 [bucket_bytes] each, in order; they hold `version`, unless that is -1."""

    def take(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of `version`. The thread that computes the checksums may end later.

        Raises:
            ValueError: the weights are not those of the manifest; the message names the tensor.
        """
        self.version = -1
        self.buckets = list(self.pack(weights))
        self.version = version
