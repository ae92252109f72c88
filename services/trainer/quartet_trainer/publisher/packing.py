"""Tensors into buckets: a few reused buffers, one filled while the others are sent."""

import math
from collections.abc import Iterator

import torch
from quartet.v1 import rollout_pb2, tensor_pb2

_DTYPES = {
    torch.uint8: tensor_pb2.DTYPE_UINT8,
    torch.int8: tensor_pb2.DTYPE_INT8,
    torch.int32: tensor_pb2.DTYPE_INT32,
    torch.int64: tensor_pb2.DTYPE_INT64,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.float64: tensor_pb2.DTYPE_FLOAT64,
}


BUFFERS = 4
"""One is filled while the others are sent and checksummed; with buckets of some MiB, all stay in the CPU's cache."""


class Packer:
    """Fills the buckets of a manifest. Memory is allocated once: fresh pages cost more than the copy."""

    def __init__(self, manifest: rollout_pb2.WeightManifest, device: torch.device | None = None):
        """`device`: where the buckets are; default: the CPU, in memory that a GPU can write at full speed."""
        self.manifest = manifest
        device = device or torch.device("cpu")
        pinned = device.type == "cpu" and torch.cuda.is_available()
        size = max(manifest.bucket_bytes, default=0)
        self._buffers = [
            torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            for _ in range(min(BUFFERS, len(manifest.bucket_bytes)))
        ]

    def pack(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 [bucket_bytes], in order; it is overwritten when the BUFFERS-th after it is due.

        Raises:
            ValueError: the weights are not those of the manifest; the text names the tensor.
        """
        tensors = iter(self.manifest.tensors)
        planned = next(tensors, None)
        for index, size in enumerate(self.manifest.bucket_bytes):
            bucket = self._buffers[index % BUFFERS][:size]
            end = 0
            while planned is not None and planned.bucket == index:
                name, tensor = next(weights, ("", None))
                if tensor is None or name != planned.name:
                    raise ValueError(f"weights: got '{name}' where '{planned.name}' was announced")
                if _DTYPES.get(tensor.dtype) != planned.dtype or list(tensor.shape) != list(planned.shape):
                    raise ValueError(f"weights: '{name}' is {tensor.dtype} {list(tensor.shape)}, not as announced")
                data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
                bucket[end : planned.offset].zero_()  # padding is part of the checksum
                end = planned.offset + math.prod(data.shape)
                bucket[planned.offset : end].copy_(data)
                planned = next(tensors, None)
            bucket[end:].zero_()
            yield bucket


def view(tensor: rollout_pb2.WeightTensor, bucket: torch.Tensor) -> torch.Tensor:
    """One tensor, in the memory of its packed bucket."""
    dtype = next(dtype for dtype, wire in _DTYPES.items() if wire == tensor.dtype)
    flat = bucket[tensor.offset : tensor.offset + math.prod(tensor.shape) * dtype.itemsize]
    return flat.view(dtype).view(tuple(tensor.shape))
