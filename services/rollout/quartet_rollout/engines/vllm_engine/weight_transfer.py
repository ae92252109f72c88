"""The backend "quartet_gloo" of vLLM's weight-transfer API: installs buckets that a WeightReceiver holds.

Transport and installation are apart, so that a checksum can be compared between them: the receiver takes the buckets,
and `update_weights` gets their tensors. The life of an update is vLLM's own (start, update, finish), as weights are
repacked for the machine's kernels when a model is loaded and must be so again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from quartet_rollout.engines.arena import tensors_in

BACKEND = "quartet_gloo"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the receiver joins groups."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What to install."""

    tensors: Iterable[tuple[str, torch.Tensor]] = field(default_factory=list)
    """(Hugging Face name, tensor on the CPU), in the process that received them."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Where they are, in another one: what `Arena.put` returned."""


class GlooWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads received tensors as if they came from a checkpoint."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        shared = update_info.shared
        model.load_weights(tensors_in(shared) if shared else iter(update_info.tensors))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # With tied embeddings the head's tensor arrives as the embedding's, so vLLM does not see the head as loaded,
        # and on the CPU its packed copy would stay that of the old weights: wrong tokens, without an error.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def register() -> None:
    """Make the backend known to vLLM in this process; again is allowed."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
