"""Our options as vLLM's engine arguments, our sampling settings as its SamplingParams. Import after `prepare`."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from quartet_rollout.engines.base import EngineError, SamplingSettings
from quartet_rollout.engines.model_folder import config_dtype, context_length
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.vllm_engine.weight_transfer import BACKEND, register
from quartet_rollout.engines.vllm_engine.worker import KEY

GIB = 2**30
CPU_KV_CACHE_GIB = 0.5


def engine_arguments(model_path: str, options: VllmOptions) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. Raises EngineError."""
    register()
    on_cpu = current_platform.is_cpu()
    if options.sleep_mode and not current_platform.is_sleep_mode_available():
        raise EngineError(
            f"rollout.vllm.sleep_mode is true; allowed: false, as vLLM cannot sleep on {current_platform.device_type}"
        )
    kv_cache_gib = options.kv_cache_gib
    if kv_cache_gib is None and on_cpu:
        kv_cache_gib = CPU_KV_CACHE_GIB
    return {
        "model": model_path,
        "dtype": config_dtype(model_path) if options.dtype == "auto" else options.dtype,
        "max_model_len": context_length(model_path, "rollout.vllm.max_model_len", options.max_model_len),
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        # Raw log-probs (the default) ignore temperature and filters, so they are not those of the behavior policy.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "quartet_rollout.engines.vllm_engine.worker.WorkerExtension",
        "enable_sleep_mode": options.sleep_mode,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(options.model_extra or {}),
    }


def sampling_parameters(sampling: SamplingSettings, index: int, key: str) -> SamplingParams:
    """Return vLLM's parameters for completion `index` of a request. Its output comes once, at the end.

    Args:
        key: identifies the completion in the workers' mask recorder.
    """
    named = {"max_new_tokens", "min_tokens", "seed", "masks", "routed_experts"}
    own = sampling.model_dump(exclude_defaults=True, exclude=named)
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_new_tokens,
        min_tokens=min(sampling.min_tokens, sampling.max_new_tokens),
        seed=None if sampling.seed is None else sampling.seed + index,
        logprobs=0,  # Only that of the sampled token.
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={KEY: key} if sampling.masked else None,
        skip_clone=True,  # No other request uses this object.
        # The remaining parameters have the same names and defaults in vLLM.
        **{name: list(value) if isinstance(value, tuple) else value for name, value in own.items()},
    )
