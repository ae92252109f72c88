"""The layout of a weight update, without torch: each tensor's bucket and offset, and checksums.

The trainer fills the buckets and the rollout reads them by the same WeightManifest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash
from quartet.v1 import rollout_pb2

from quartet_common.tensors import item_size

CHECKSUM_ALGORITHM = "xxh3_64"

# Offsets are multiples of this, so that every tensor is an aligned view of its bucket.
ALIGNMENT = 16


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
    names: set[str] = set()
    sizes: list[int] = []
    for name, dtype, shape in specs:
        if name in names:
            raise ValueError(f"tensor '{name}' comes twice")
        names.add(name)
        size = math.prod(shape) * item_size(dtype)
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        if not sizes or (sizes[-1] and sizes[-1] + padded > bucket_bytes):
            sizes.append(0)
        manifest.tensors.add(name=name, dtype=dtype, shape=shape, bucket=len(sizes) - 1, offset=sizes[-1])
        sizes[-1] += padded
    manifest.bucket_bytes.extend(sizes)
    return manifest


def check_manifest(manifest: rollout_pb2.WeightManifest) -> None:
    """Check a received manifest. Raises ValueError naming the tensor if it is inconsistent."""
    if manifest.checksum_algorithm != CHECKSUM_ALGORITHM:
        raise ValueError(f"checksum_algorithm: got '{manifest.checksum_algorithm}'; allowed: {CHECKSUM_ALGORITHM}")
    for tensor in manifest.tensors:
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


class BackgroundChecksum:
    """Computes checksums of buckets on a thread; each covers all bytes up to the bucket's end.

    xxHash releases the GIL, so the thread does not delay packing or transfers. The last checksum covers everything; the
    first one in which two peers differ identifies the bucket.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._thread = ThreadPoolExecutor(1, "weight-checksum")
        self._buckets: list[Future[int]] = []

    def add(self, bucket: Callable[[], memoryview]) -> "Future[int]":
        """Add the next bytes, which `bucket` returns on the thread. They may change once the future is done."""
        self._buckets.append(self._thread.submit(self._read, bucket))
        return self._buckets[-1]

    def _read(self, bucket: Callable[[], memoryview]) -> int:
        self._hash.update(bucket())
        return self._hash.intdigest()

    def values(self) -> list[int]:
        """Wait for all buckets and return their checksums; raises what a bucket raised."""
        self.close()
        return [bucket.result() for bucket in self._buckets]

    def close(self) -> None:
        """End the thread after the buckets that were added."""
        self._thread.shutdown(wait=False)


def folder_checksum(folder: Path) -> int:
    """Return the 64-bit XXH3 of a model folder's safetensors files, in the order of their names.

    Services compare it to check that they read the same base model. Raises OSError, ValueError without such files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there is no *.safetensors file in '{folder}'")
    hashed = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(16 << 20):
                hashed.update(block)
    return hashed.intdigest()
