"""Tensors into buckets: as a few reused buffers, one filled while the others are sent, or as a copy of all of them."""

import math
from collections.abc import Callable, Generator, Iterator
from functools import partial

import torch
from quartet.v1 import rollout_pb2

from quartet_common.weights import BackgroundChecksum
from quartet_weights.buckets import torch_dtype

BUFFERS = 4
"""One is filled while the others are sent and checksummed."""

Weights = Callable[[], Generator[tuple[str, torch.Tensor], None, None]]
"""Returns the tensors of a manifest by name, in its order; what it returns is always exhausted or closed."""


class Packer:
    """Fills the buckets of a manifest. Memory is allocated once: fresh pages cost more than the copy."""

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None):
        """`device`: where the buckets are; default: the CPU, in memory that a GPU can write at full speed."""
        self.manifest = manifest
        self._device = device or torch.device("cpu")
        self._buffers: list[torch.Tensor] = []

    def pack(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 [bucket_bytes], in order; it is overwritten when the BUFFERS-th after it is due.

        Raises:
            ValueError: the weights are not those of the manifest; the text names the tensor.
        """
        if not self._buffers:
            sizes = self.manifest.bucket_bytes
            pinned = self._device.type == "cpu" and torch.cuda.is_available()
            self._buffers = [
                torch.zeros(max(sizes[buffer::BUFFERS]), dtype=torch.uint8, device=self._device, pin_memory=pinned)
                for buffer in range(min(BUFFERS, len(sizes)))  # a large tensor, in a bucket of its own, enlarges one
            ]
        return fill(self.manifest, weights, lambda index, size: self._buffers[index % BUFFERS][:size])


class Snapshot:
    """A copy of the weights of one version that leaves as it stands: all buckets, packed, and their checksum.

    It is taken before an update begins, so that nothing but the broadcast is left for the time in which generation
    stands still; another attempt, and a rollout that comes late, are served from it too. Memory is allocated once.
    """

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None):
        """`device`: where the copy stands; default: the CPU."""
        self.version = -1
        self.manifest = manifest
        self.buckets: list[torch.Tensor] = []
        """uint8 [bucket_bytes] each, in order; of `version`, if that is not -1."""
        self._device = device or torch.device("cpu")
        self._checksum = BackgroundChecksum()

    def take(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of `version`; the checksum is computed on a thread meanwhile, and maybe a little longer.

        Raises:
            ValueError: the weights are not those of the manifest; the text names the tensor.
        """
        self.version = -1
        last, self._checksum = self._checksum, BackgroundChecksum()
        last.value()  # nobody may have asked for it, and it reads what is about to change
        if not self.buckets:
            sizes = self.manifest.bucket_bytes
            self.buckets = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        for bucket in fill(self.manifest, weights, lambda index, _: self.buckets[index]):
            self._checksum.add(partial(_bytes, bucket))
        self.version = version

    def checksum(self) -> int:
        """Return the checksum of all buckets, waiting for it if need be."""
        return self._checksum.value()


def _bytes(bucket: torch.Tensor) -> memoryview:
    return memoryview(bucket.cpu().numpy())


def fill(
    manifest: rollout_pb2.WeightManifest,
    weights: Iterator[tuple[str, torch.Tensor]],
    bucket_of: Callable[[int, int], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Fill the buckets in order and yield each. `bucket_of(index, size)` is where one is made, uint8 [size].

    Raises:
        ValueError: the weights are not those of the manifest; the text names the tensor.
    """
    tensors = iter(manifest.tensors)
    planned = next(tensors, None)
    for index, size in enumerate(manifest.bucket_bytes):
        bucket, end = bucket_of(index, size), 0
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
        yield bucket
