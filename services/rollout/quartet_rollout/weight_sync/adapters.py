"""Merges a received LoRA adapter into the weights of its base model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError, safe_open

from quartet_common.model_folder import folder_checksum
from quartet_common.weights import LORA_PREFIX
from quartet_rollout.errors import EngineError


class Base:
    """The weights of a model folder, to which a received LoRA adapter is added: W = W0 + B A alpha / r
    (arXiv:2106.09685).

    W0 is read from the folder for each update, not from the installed weights, so that no adapter is added twice.
    Tensor names are PEFT's.
    """

    def __init__(self, folder: Path, names: Container[str]) -> None:
        """`names`: the model's parameters; other tensors in the folder are ignored."""
        self._folder = folder
        self._names = names
        self._checksum: int | None = None

    def check(self, lora: rollout_pb2.LoraConfig) -> None:
        """Raise EngineError unless the trainer has the same base model. The first call reads the whole folder."""
        if not lora.base_checksum:
            return
        if self._checksum is None:
            try:
                self._checksum = folder_checksum(self._folder)
            except (OSError, ValueError) as error:
                raise EngineError(f"the base model of the adapter cannot be read: {error}") from error
        if self._checksum != lora.base_checksum:
            raise EngineError(
                f"the adapter is for a base model of checksum {lora.base_checksum:016x}, and '{self._folder}' has "
                f"{self._checksum:016x}: give trainer and rollout the same model.path"
            )

    def merged(
        self, lora: rollout_pb2.LoraConfig, adapter: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the whole model, with the adapter added. Sums are in float32, rounded once to the
        folder's dtype. Raises EngineError when the folder cannot be read, or lacks a matrix of the adapter."""
        scale = lora.alpha / lora.r
        unused = set(adapter)
        try:
            for path in sorted(self._folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in (name for name in file.keys() if name in self._names):  # noqa: SIM118 (no mapping)
                        weight = file.get_tensor(name)
                        part = LORA_PREFIX + name.removesuffix(".weight")
                        a, b = adapter.get(f"{part}.lora_A.weight"), adapter.get(f"{part}.lora_B.weight")
                        if a is not None and b is not None:
                            delta = (b.float() @ a.float()) * scale
                            unused -= {f"{part}.lora_A.weight", f"{part}.lora_B.weight"}
                            weight = (weight.float() + delta.to(weight.device)).to(weight.dtype)
                        yield name, weight
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the base model of the adapter cannot be read: {error}") from error
        if unused:
            raise EngineError(f"the base model in '{self._folder}' has no matrix for '{min(unused)}'")
