"""The weight methods of `Engine` up to the installation: the engine's workers are members of the weight group, and an
announced update must fit its model. Imports no torch before the engine is started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import LORA_PREFIX, check_manifest, padded_bytes
from quartet_rollout.errors import EngineError, ManifestError, WeightTransferError, unpack_error
from quartet_rollout.weight_sync import WeightGroupInfo

if TYPE_CHECKING:
    import torch

    from quartet_rollout.weight_sync.receiver import WeightReceiver

DTYPES = (tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16, tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT64)
"""Element types of weights in transfer; the installation converts them to the model's."""
GRACE_SECONDS = 1.0
"""How long after the transport's own deadline a call is abandoned."""
POLL_SECONDS = 0.01
"""Interval at which the workers are polled for the end of a transfer."""


class WeightGroupMixin:
    """Joins the group, receives weights and computes checksums, each within a deadline.

    By default the one member is this process (`received_tensors`). An engine that computes in other processes has a
    `WeightReceiver` in each, and overrides `call_members`.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._spec: ModelSpec | None = None
        self._transports: list[str] = []

    @property
    def failure(self) -> str:
        """See `Engine.failure`."""
        return ""

    async def load_spec(self) -> None:
        """Read the model's names and shapes. Call it once, in `start`."""
        from quartet_rollout.weight_sync.receiver import transports

        self._spec = await asyncio.to_thread(ModelSpec.of_folder, self._model_path)
        self._transports = transports()

    def weight_capabilities(self) -> list[str]:
        """Return the part of `Engine.capabilities` that is about weights."""
        ways = (f"weights.{name}" for name in self._transports)
        return [*ways, "weights.full", "weights.lora", "weights.in_flight"]

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of the model. Raises EngineError before `load_spec`."""
        if self._spec is None:
            raise EngineError("the engine has not been started")
        return self._spec

    def check_manifest(self, manifest: rollout_pb2.WeightManifest) -> None:
        self.spec.check(manifest)

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        names = list(self.spec.shapes)
        await self._transfer(info.timeout_seconds, "joining the weight group", "begin_join", asdict(info), names)

    async def leave_weight_group(self) -> None:
        if self._spec is not None:
            with suppress(EngineError):  # An engine that has failed is in no group.
                await self.call_members("leave")

    async def receive_weights(
        self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = ""
    ) -> list[int]:
        self.check_manifest(manifest)
        arguments = manifest.SerializeToString(), timeout_seconds, path
        first, *others = await self._transfer(timeout_seconds, "the transfer", "begin_receive", *arguments)
        if any(other != first for other in others):
            await self.leave_weight_group()
            raise WeightTransferError("the engine's workers did not receive the same bytes")
        return first

    async def call_members(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every member's `WeightReceiver`, one that does not block; return the results."""
        return [getattr(self._receiver, method)(*args)]

    def received_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this process received, for the installation. Raises EngineError when nothing was."""
        return self._receiver.tensors()

    @cached_property
    def _receiver(self) -> WeightReceiver:
        from quartet_rollout.weight_sync.receiver import WeightReceiver

        return WeightReceiver(self._model_path)

    async def _transfer(self, seconds: float, what: str, method: str, *args: Any) -> list[Any]:
        """Begin a call in every member and poll until all have ended; return the results. All leave the group when one
        fails, at the deadline, or when this is cancelled."""
        try:
            await self.call_members(method, *args)
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                while True:
                    ends = await self.call_members("poll")
                    for failed in (end for end in ends if end and end[0]):
                        raise unpack_error(failed)
                    if None not in ends:
                        return [result for _, result in ends]
                    await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            await self.leave_weight_group()
            if isinstance(error, TimeoutError):
                raise WeightTransferError(f"{what} took longer than {seconds:g} s") from error
            raise


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
            names = {number: name for name, number in rollout_pb2.WeightKind.items()}
            kind = names.get(manifest.kind, manifest.kind)  # a later contract may have more
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
