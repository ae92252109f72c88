"""Does an announced weight update fit the model, and where in the buckets its tensors are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import ALIGNMENT
from quartet_common.weights import check_manifest as check_consistency
from quartet_rollout.engines.base import ManifestError
from quartet_rollout.weights import adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TORCH_DTYPES: dict[int, torch.dtype] = {
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_FLOAT64: torch.float64,
}
"""Element types in which weights may travel. They are converted to the model's own when installed."""


@dataclass(frozen=True)
class ModelSpec:
    """Names and shapes of a model's tensors, as its family's files have them: transformers 5 makes others of some when
    it loads them, e.g. one of all experts of a layer."""

    shapes: Mapping[str, tuple[int, ...]]
    """Every parameter, tied ones under each of their names, and every buffer that is saved."""
    tied: frozenset[str]
    """Names that may be left out because they are another parameter."""
    folder: Path | None = None
    """The model's folder, whose weights adapters are added to."""

    @classmethod
    def from_config(cls, config: PretrainedConfig, folder: Path | None = None) -> ModelSpec:
        """Read it off a model built without storage."""
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        whole = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(whole.items())}
        canonical = {name: tensor for name, tensor in whole.items() if first[id(tensor)] == name}
        with torch.no_grad():
            every, untied = (revert_weight_conversion(model, tensors) for tensors in (whole, canonical))
        shapes = {name: tuple(tensor.shape) for name, tensor in every.items()}
        return cls(shapes=shapes, tied=frozenset(shapes.keys() - untied.keys()), folder=folder)

    def check(self, manifest: rollout_pb2.WeightManifest) -> None:
        """Raise ManifestError, naming the tensor, unless the manifest carries exactly this model, or an adapter of it.

        An adapter is checked by `adapter.shapes_of`: its tensors are those of some of the model's matrices.
        """
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            self._check_tensors(manifest, adapter.shapes_of(manifest, self.shapes), frozenset())
        elif manifest.kind == rollout_pb2.WEIGHT_KIND_FULL:
            self._check_tensors(manifest, self.shapes, self.tied)
        else:
            kind = rollout_pb2.WeightKind.Name(manifest.kind)
            raise ManifestError(f"manifest.kind: got {kind}; allowed: WEIGHT_KIND_FULL, WEIGHT_KIND_LORA")

    @staticmethod
    def _check_tensors(
        manifest: rollout_pb2.WeightManifest, shapes: Mapping[str, tuple[int, ...]], tied: frozenset[str]
    ) -> None:
        try:
            check_consistency(manifest)
        except ValueError as error:
            raise ManifestError(f"manifest: {error}") from error
        seen: set[str] = set()
        padded_bytes = 0
        for tensor in manifest.tensors:
            name, shape = tensor.name, tuple(tensor.shape)
            if name not in shapes:
                raise ManifestError(f"manifest: tensor '{name}' is not a parameter of this model")
            if name in seen:
                raise ManifestError(f"manifest: tensor '{name}' comes twice")
            if shape != shapes[name]:
                raise ManifestError(f"manifest: tensor '{name}' has shape {list(shape)}; allowed: {list(shapes[name])}")
            if tensor.dtype not in TORCH_DTYPES:
                came = tensor_pb2.Dtype.Name(tensor.dtype)
                allowed = ", ".join(tensor_pb2.Dtype.Name(dtype) for dtype in TORCH_DTYPES)
                raise ManifestError(f"manifest: tensor '{name}' has dtype {came}; allowed: {allowed}")
            seen.add(name)
            padded_bytes += -(-_size(tensor) // ALIGNMENT) * ALIGNMENT
        missing = sorted(shapes.keys() - tied - seen)
        if missing:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise ManifestError(f"manifest: parameter '{missing[0]}'{more} missing")
        # What is announced is allocated: buckets may not be larger than what the model needs.
        if sum(manifest.bucket_bytes) > padded_bytes:
            raise ManifestError(
                f"manifest: buckets hold {sum(manifest.bucket_bytes)} bytes; allowed: the tensors' {padded_bytes}"
            )


def views(manifest: rollout_pb2.WeightManifest, buckets: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the manifest's order; the tensors share memory with the uint8 `buckets`."""
    for tensor in manifest.tensors:
        yield tensor.name, view(tensor, buckets[tensor.bucket])


def view(tensor: rollout_pb2.WeightTensor, bucket: torch.Tensor) -> torch.Tensor:
    """One tensor, in the memory of its bucket."""
    flat = bucket[tensor.offset : tensor.offset + _size(tensor)]
    return flat.view(TORCH_DTYPES[tensor.dtype]).view(tuple(tensor.shape))


def _size(tensor: rollout_pb2.WeightTensor) -> int:
    return prod(tensor.shape) * TORCH_DTYPES[tensor.dtype].itemsize
