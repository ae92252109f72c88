"""The tensors of a weight update as views of its packed buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
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
