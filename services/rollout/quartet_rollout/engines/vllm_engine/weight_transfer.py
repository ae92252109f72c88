"""The weight transfer engine of vLLM's workers: each worker is a member of the weight group.

A worker receives the buckets on a thread, into host memory, while it generates. The installation is vLLM's own sequence
(start, update, finish) within a pause: weights are repacked for the machine's kernels when a model is loaded, and must
be repacked again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from quartet_rollout.errors import EngineError
from quartet_rollout.weight_sync.receiver import WeightReceiver

BACKEND = "quartet"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: groups are joined through `WeightReceiver.begin`."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Empty: what was received is installed."""


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads what its receiver got as if it came from a checkpoint."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = WeightReceiver(self.model_config.model)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        # vLLM 0.32 packs experts for the CPU's kernels only when it makes the kernels, which an update keeps: the new
        # weights would be taken for packed ones, and tokens be wrong without an error. So they are made again.
        if current_platform.is_cpu():
            for _, layer in self._experts():
                layer.quant_method.moe_kernel = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(self.receiver.tensors())

    def finish_weight_update(self) -> None:
        stayed = self._stayed()
        finalize_layerwise_reload(self.model, self.model_config)
        if stayed:
            raise EngineError(
                f"vLLM's {type(self.model).__name__} did not take the weights of {stayed[0]} in an update "
                f"({len(stayed)} such layers), which keeps the old ones; use the transformers engine for this model"
            )
        # With tied embeddings the head's tensor arrives as the embedding's, so vLLM does not see the head as loaded,
        # and on the CPU its packed copy would stay that of the old weights: wrong tokens, without an error.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        self.receiver.discard()

    def _stayed(self) -> list[str]:
        """Names of layers of experts of which nothing was loaded: vLLM only logs that they keep their old weights."""
        waiting = [(name, get_layerwise_info(layer)) for name, layer in self._experts()]
        return [name for name, info in waiting if info.can_load() and not info.load_numel]

    def _experts(self) -> list[tuple[str, Any]]:
        """The layers of experts, by name."""
        return [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, RoutedExperts)]

    def shutdown(self) -> None:
        self.receiver.leave()


def register() -> None:
    """Make the backend available to vLLM in this process; again is allowed."""
    with suppress(ValueError):  # It is registered already.
        WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
