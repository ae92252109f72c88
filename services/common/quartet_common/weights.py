"""The layout of a weight update, without torch: each tensor's bucket and offset, and the files of buckets.

The trainer fills the buckets and the rollout reads them by the same WeightManifest.
"""

import math
from collections.abc import Iterable, Sequence

from quartet.v1 import rollout_pb2

from quartet_common.tensors import item_size

CHECKSUM_ALGORITHM = "xxh3_64"

# Offsets are multiples of this, so that every tensor is an aligned view of its bucket.
ALIGNMENT = 16
LORA_PREFIX = "base_model.model."
"""Begins the names of an adapter's tensors, which are PEFT's."""


def plan_buckets(
    kind: int, specs: Iterable[tuple[str, int, Sequence[int]]], bucket_bytes: int
) -> rollout_pb2.WeightManifest:
    """Return the manifest that packs tensors, in their order, into buckets.

    Args:
        kind: a rollout_pb2.WeightKind.
        specs: (Hugging Face name, tensor_pb2.Dtype, shape) of each tensor.
        bucket_bytes: size at which a bucket is closed; a larger tensor gets a bucket of its own.

    Raises:
        ValueError: `bucket_bytes` is not positive, or a name comes twice.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}; allowed: at least {ALIGNMENT}")
    manifest = rollout_pb2.WeightManifest(kind=kind, checksum_algorithm=CHECKSUM_ALGORITHM)
    sizes: list[int] = []
    for name, dtype, shape in specs:
        padded = padded_bytes(dtype, shape)
        if not sizes or (sizes[-1] and sizes[-1] + padded > bucket_bytes):
            sizes.append(0)
        manifest.tensors.add(name=name, dtype=dtype, shape=shape, bucket=len(sizes) - 1, offset=sizes[-1])
        sizes[-1] += padded
    manifest.bucket_bytes.extend(sizes)
    check_manifest(manifest)
    return manifest


def padded_bytes(dtype: int, shape: Iterable[int]) -> int:
    """Return the bytes of a bucket that a tensor takes."""
    return -(-math.prod(shape) * item_size(dtype) // ALIGNMENT) * ALIGNMENT


def check_manifest(manifest: rollout_pb2.WeightManifest) -> None:
    """Check a received manifest. Raises ValueError naming the tensor if it is inconsistent."""
    if manifest.checksum_algorithm != CHECKSUM_ALGORITHM:
        raise ValueError(f"checksum_algorithm: got '{manifest.checksum_algorithm}'; allowed: {CHECKSUM_ALGORITHM}")
    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.name in names:
            raise ValueError(f"tensor '{tensor.name}' comes twice")
        names.add(tensor.name)
        if not 0 <= tensor.bucket < len(manifest.bucket_bytes):
            raise ValueError(f"tensor '{tensor.name}': bucket {tensor.bucket} of {len(manifest.bucket_bytes)}")
        if any(extent < 0 for extent in tensor.shape):
            raise ValueError(f"tensor '{tensor.name}': shape {list(tensor.shape)} has a negative dimension")
        end = tensor.offset + math.prod(tensor.shape) * item_size(tensor.dtype)
        if tensor.offset < 0 or tensor.offset % ALIGNMENT or end > manifest.bucket_bytes[tensor.bucket]:
            raise ValueError(f"tensor '{tensor.name}': bytes {tensor.offset} to {end} do not fit its bucket")


def bucket_file(manifest: rollout_pb2.WeightManifest, bucket: int) -> str:
    """Return the name of a bucket's file in its version's folder, for the file transport.

    A single file is named as Hugging Face or PEFT names it; several are named like Hugging Face's shards.
    """
    stem = "adapter_model" if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA else "model"
    count = len(manifest.bucket_bytes)
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{bucket + 1:05d}-of-{count:05d}.safetensors"
