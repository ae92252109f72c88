"""Weights into buckets, as a trainer does it."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from quartet.v1 import rollout_pb2, tensor_pb2
from safetensors.torch import save_file

from quartet_common.weights import plan_buckets

DTYPES = {torch.float32: tensor_pb2.DTYPE_FLOAT32, torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16}


def pack(
    weights: dict[str, torch.Tensor], bucket_bytes: int, lora: rollout_pb2.LoraConfig | None = None
) -> tuple[rollout_pb2.WeightManifest, list[torch.Tensor]]:
    """The manifest of these weights, or of this adapter's, and the uint8 buckets it describes."""
    specs = [(name, DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in weights.items()]
    kind = rollout_pb2.WEIGHT_KIND_FULL if lora is None else rollout_pb2.WEIGHT_KIND_LORA
    manifest = plan_buckets(kind, specs, bucket_bytes)
    if lora is not None:
        manifest.lora.CopyFrom(lora)
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in manifest.bucket_bytes]
    for entry in manifest.tensors:
        data = weights[entry.name].contiguous().view(-1).view(torch.uint8)
        buckets[entry.bucket][entry.offset : entry.offset + data.numel()] = data
    return manifest, buckets


def checksum(buckets: list[torch.Tensor]) -> int:
    """What a receiver of these buckets must find."""
    hashed = xxhash.xxh3_64()
    for bucket in buckets:
        hashed.update(bucket.numpy())
    return hashed.intdigest()


def write(
    weights: dict[str, torch.Tensor], folder: Path, bucket_bytes: int, lora: rollout_pb2.LoraConfig | None = None
) -> tuple[rollout_pb2.WeightManifest, int]:
    """Write a version's folder as docs/weights.md says; return its manifest and checksum."""
    from quartet_common.weights import bucket_file  # which the first release, that the contract tests run, has not

    manifest, buckets = pack(weights, bucket_bytes, lora)
    for index in range(len(buckets)):
        names = [tensor.name for tensor in manifest.tensors if tensor.bucket == index]
        save_file({name: weights[name] for name in names}, folder / bucket_file(manifest, index))
    return manifest, checksum(buckets)
