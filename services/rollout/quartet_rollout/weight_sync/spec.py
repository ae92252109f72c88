"""The weight group to join, and the check of an update's manifest against the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import check_manifest, padded_bytes
from quartet_rollout.errors import ManifestError

DTYPES = (tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16, tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT64)
"""Element types of weights in transfer; the installation converts them to the model's."""
LORA_PREFIX = "base_model.model."


@dataclass(frozen=True)
class WeightGroupInfo:
    """An invitation to the process group of a group epoch."""

    transport: str
    """"gloo", "nccl", "file", or the name of another package's transport."""
    store_host: str
    """Host of the group's store, at the trainer."""
    store_port: int
    rank: int
    """First rank of this engine, >= 1; the trainer is rank 0 and sends."""
    world_size: int
    timeout_seconds: float
    """Deadline of the rendezvous and, unless a call brings its own, of each operation."""
    secret: bytes = field(repr=False)
    """Secret of the epoch, part of the store's key prefix."""
    epoch: int
    """The group epoch, >= 0."""
    invitation: Mapping[str, str] = field(default_factory=dict)
    """What the trainer's end of another package's transport sends to the end here."""
    interface: str = ""
    """Network interface to listen on; "": that of the route to the store."""


@dataclass(frozen=True)
class ModelSpec:
    """Names and shapes of a model's tensors, as in its checkpoint files: transformers 5 converts some when it loads
    them, e.g. merges the experts of a layer into one tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    """Every parameter, tied ones under each of their names, and every persistent buffer."""
    tied: frozenset[str]
    """Names that may be left out because they are tied to another parameter."""

    @classmethod
    def of_folder(cls, model_path: str) -> ModelSpec:
        """Return that of a folder, from its model built on the meta device."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        with torch.device("meta"):
            return cls.of_model(AutoModelForCausalLM.from_config(config))

    @classmethod
    def of_model(cls, model: Any) -> ModelSpec:
        """Return that of a transformers model."""
        from transformers.core_model_loading import revert_weight_conversion

        whole = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(whole.items())}
        every = {name: tensor.detach().to("meta") for name, tensor in whole.items()}
        canonical = {name: every[name] for name, tensor in whole.items() if first[id(tensor)] == name}
        shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, every).items()}
        return cls(shapes=shapes, tied=frozenset(shapes.keys() - revert_weight_conversion(model, canonical).keys()))

    def check(self, manifest: rollout_pb2.WeightManifest) -> None:
        """Raise ManifestError, naming the tensor, unless the manifest has exactly this model's tensors, or those of a
        LoRA adapter for it."""
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            _check_tensors(manifest, self._adapter_shapes(manifest.lora), frozenset())
        elif manifest.kind == rollout_pb2.WEIGHT_KIND_FULL:
            _check_tensors(manifest, self.shapes, self.tied)
        else:
            kind = rollout_pb2.WeightKind.Name(manifest.kind)
            raise ManifestError(f"manifest.kind: got {kind}; allowed: WEIGHT_KIND_FULL, WEIGHT_KIND_LORA")

    def _adapter_shapes(self, lora: rollout_pb2.LoraConfig) -> dict[str, tuple[int, ...]]:
        """Return the tensors of an adapter: A [r, in] and B [out, r] for every matrix [out, in] that it targets.

        Raises ManifestError for an invalid configuration of the adapter.
        """
        if lora.r < 1:
            raise ManifestError(f"manifest.lora.r: got {lora.r}; allowed: at least 1")
        if not 0 < abs(lora.alpha) < float("inf"):
            raise ManifestError(f"manifest.lora.alpha: got {lora.alpha:g}; allowed: a finite number, not 0")
        matrices = {
            name.removesuffix(".weight"): shape
            for name, shape in self.shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for target in lora.target_modules:
            found = [name for name in matrices if name.rpartition(".")[2] == target]
            # lm_head may be tied to the embedding, and then has no matrix of its own.
            if not found or target in ("embed_tokens", "lm_head"):
                raise ManifestError(f"manifest.lora.target_modules: '{target}' is no inner linear layer of this model")
            for name in found:
                out, into = matrices[name]
                shapes[f"{LORA_PREFIX}{name}.lora_A.weight"] = (lora.r, into)
                shapes[f"{LORA_PREFIX}{name}.lora_B.weight"] = (out, lora.r)
        if not shapes:
            raise ManifestError("manifest.lora.target_modules: got none; allowed: at least one module, e.g. q_proj")
        return shapes


def _check_tensors(
    manifest: rollout_pb2.WeightManifest, shapes: Mapping[str, tuple[int, ...]], tied: frozenset[str]
) -> None:
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise ManifestError(f"manifest: {error}") from error
    needed = 0
    for tensor in manifest.tensors:
        name, shape = tensor.name, tuple(tensor.shape)
        if name not in shapes:
            raise ManifestError(f"manifest: tensor '{name}' is not a parameter of this model")
        if shape != tuple(shapes[name]):
            raise ManifestError(f"manifest: tensor '{name}' has shape {list(shape)}; allowed: {list(shapes[name])}")
        if tensor.dtype not in DTYPES:
            came, *allowed = (tensor_pb2.Dtype.Name(dtype) for dtype in (tensor.dtype, *DTYPES))
            raise ManifestError(f"manifest: tensor '{name}' has dtype {came}; allowed: {', '.join(allowed)}")
        needed += padded_bytes(tensor.dtype, shape)
    missing = sorted(shapes.keys() - tied - {tensor.name for tensor in manifest.tensors})
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ManifestError(f"manifest: parameter '{missing[0]}'{more} missing")
    # Buffers of the announced sizes are allocated: these may not exceed what the model needs.
    if sum(manifest.bucket_bytes) > needed:
        raise ManifestError(
            f"manifest: buckets hold {sum(manifest.bucket_bytes)} bytes; allowed: the tensors' {needed}"
        )
