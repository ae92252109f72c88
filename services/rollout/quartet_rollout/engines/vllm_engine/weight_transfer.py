"""The weight transfer engine of vLLM's workers: each worker is a member of the weight group.

A worker receives the buckets on a thread, into host memory, while it generates. The installation is vLLM's own sequence
(start, update, finish), during a pause: vLLM repacks weights for its kernels when it loads a model, so new weights must
be repacked too.
"""

from __future__ import annotations

from contextlib import suppress
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


class BucketTransferEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Loads the weights that its receiver received, like a checkpoint. vLLM's two messages are empty: groups are joined
    through `WeightReceiver.begin_join`."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = WeightReceiver(self.model_config.model)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        # vLLM 0.32 packs experts for the CPU's kernels only when it creates the kernels, and an update keeps these: it
        # would treat the new weights as packed, and sample wrong tokens. Without the kernels it recreates them.
        if current_platform.is_cpu():
            for _, layer in self._experts():
                layer.quant_method.moe_kernel = None

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(self.receiver.tensors())

    def finish_weight_update(self) -> None:
        unloaded = self._unloaded_experts()
        finalize_layerwise_reload(self.model, self.model_config)
        if unloaded:
            raise EngineError(
                f"vLLM's {type(self.model).__name__} did not take the weights of {unloaded[0]} in an update "
                f"({len(unloaded)} such layers), which keeps the old ones; use the transformers engine for this model"
            )
        # With tied embeddings only the embedding's tensor arrives, so vLLM does not count the head as loaded and on the
        # CPU keeps its packed copy of the old weights: it would sample wrong tokens.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        self.receiver.discard()

    def _unloaded_experts(self) -> list[str]:
        """Return the names of expert layers that no tensor was loaded into: vLLM only logs that they keep their old
        weights."""
        waiting = [(name, get_layerwise_info(layer)) for name, layer in self._experts()]
        return [name for name, info in waiting if info.can_load() and not info.load_numel]

    def _experts(self) -> list[tuple[str, Any]]:
        """Return the expert layers with their names."""
        return [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, RoutedExperts)]

    def shutdown(self) -> None:
        self.receiver.leave()


def register() -> None:
    """Register the backend in this process, unless it is registered."""
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
