"""The tensors of a weight update as views of its packed buckets, and the buckets' checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch
import xxhash
from quartet.v1 import rollout_pb2, tensor_pb2


def torch_dtype(tensor: rollout_pb2.WeightTensor) -> torch.dtype:
    """Return a tensor's announced element type."""
    return getattr(torch, tensor_pb2.Dtype.Name(tensor.dtype).removeprefix("DTYPE_").lower())


def view(tensor: rollout_pb2.WeightTensor, bucket: torch.Tensor) -> torch.Tensor:
    """Return one tensor as a view of its uint8 bucket."""
    dtype = torch_dtype(tensor)
    flat = bucket[tensor.offset : tensor.offset + prod(tensor.shape) * dtype.itemsize]
    return flat.view(dtype).view(tuple(tensor.shape))


def views(manifest: rollout_pb2.WeightManifest, buckets: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the manifest's order; the tensors share memory with the uint8 `buckets`."""
    for tensor in manifest.tensors:
        yield tensor.name, view(tensor, buckets[tensor.bucket])


class BackgroundChecksum:
    """Computes checksums of buckets on a thread, which ends with this object; each covers all bytes up to the bucket's
    end.

    xxHash releases the GIL, so the thread does not delay packing or transfers. The last checksum covers everything; the
    first one in which two peers differ identifies the bucket.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: for the copies of buckets on a GPU; None: the current one."""
        self._hash = xxhash.xxh3_64()
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, "weight-checksum")
        self._buckets: list[Future[int]] = []

    def add(self, bucket: torch.Tensor) -> Future[int]:
        """Add a uint8 bucket, whose bytes may change once the future is done."""
        self._buckets.append(self._thread.submit(self._read, bucket))
        return self._buckets[-1]

    def _read(self, bucket: torch.Tensor) -> int:
        with torch.cuda.stream(self._stream):
            self._hash.update(memoryview(bucket.cpu().numpy()))
        return self._hash.intdigest()

    def values(self) -> list[int]:
        """Wait for all buckets and return their checksums; raises what a bucket raised."""
        return [bucket.result() for bucket in self._buckets]
