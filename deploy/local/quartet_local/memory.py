"""Whether GPUs hold what a run puts on them, by a lower bound: weights, gradients, optimizer; no activations."""

import math
from collections.abc import Sequence
from pathlib import Path

from quartet_common.config import ConfigError, LoadedConfig, load_config
from quartet_common.gpus import GIB, Gpu
from quartet_common.model_folder import read_safetensors_header
from quartet_local.placement import RolloutKeys, Service, TrainerKeys, VllmKeys


def check_memory(service: Service, config: LoadedConfig, overrides: Sequence[str]) -> None:
    """Check a rollout or trainer that is to run on GPUs.

    Args:
        overrides: those that `config` was loaded with.

    Raises:
        ConfigError: a GPU has too little memory, with the sum.
    """
    model = config.model.path
    if not service.gpus or model is None or not model.is_dir():
        return  # without a model the service's own check has the reason
    if service.kind == "rollout":
        rollout = load_config("rollout", RolloutKeys, config.path, overrides).section
        if rollout.engine == "vllm":
            _check_vllm(service, rollout.vllm, model)
    elif service.kind == "trainer":
        _check_trainer(service, load_config("trainer", TrainerKeys, config.path, overrides).section, model)


def _check_vllm(service: Service, keys: VllmKeys, model: Path) -> None:
    """vLLM starts if its share of a GPU is free, and fits weights and KV cache into it; a KV cache of a given size may
    go beyond that share."""
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    size = {"auto": 0, "float32": 4}.get(keys.dtype, 2)
    weights = (parameter_count(model) * size or stored) / len(service.gpus or ())
    own = f"weights {weights / GIB:.2f} GiB"
    share = f"rollout.vllm.gpu_memory_utilization ({keys.gpu_memory_utilization:g})"
    for gpu in service.gpus or ():
        usable = keys.gpu_memory_utilization * gpu.memory
        _check(service, gpu, usable, share, gpu.free, "free memory")
        if keys.kv_cache_gib is None:
            _check(service, gpu, weights, own, usable, share)
        else:
            cache = f"KV cache {keys.kv_cache_gib:g} GiB (rollout.vllm.kv_cache_gib)"
            _check(service, gpu, weights + keys.kv_cache_gib * GIB, f"{own} + {cache}", gpu.free, "free memory")


def _check_trainer(service: Service, keys: TrainerKeys, model: Path) -> None:
    gpus = service.gpus or ()
    count, parts = parameter_count(model), rank_bytes(keys, len(gpus))
    terms = " + ".join(f"{name} {size:.4g}" for name, size in parts.items() if size)
    sum_ = f"{count / 1e9:.3g} billion parameters × ({terms}) bytes"
    for gpu in gpus:
        _check(service, gpu, count * sum(parts.values()), sum_, gpu.free, "free memory")


def rank_bytes(keys: TrainerKeys, ranks: int) -> dict[str, float]:
    """Return what a rank holds at the least, in bytes a parameter of the model, by docs/plugins.md."""
    sharded = keys.plugin in ("torch_fsdp", "gemini")  # all of it over all ranks
    half = keys.precision in ("auto", "bf16") and keys.plugin in ("low_level_zero", "hybrid_parallel", "gemini")
    size = 8 if keys.precision == "fp64" else 2 if half else 4
    zero = keys.zero_stage or (1 if keys.plugin == "low_level_zero" else 0)
    by_model = ranks if sharded else keys.tp_size * keys.pp_size
    by_optimizer = ranks if sharded or zero else by_model
    weights = size / by_model
    if keys.lora.r:  # an adapter's own part is small
        return {"weights": weights}
    gradients = 0 if keys.plugin == "gemini" else size / (ranks if zero == 2 else by_model)
    moments = (16 if size == 8 else 8) / by_optimizer
    parts = {"weights": weights, "gradients": gradients}
    if not keys.offload_optimizer:
        parts |= {"float32 weights": half * 4 / by_optimizer, "Adam": moments}
    return {**parts, "reference model": weights if keys.kl_coefficient else 0}


def parameter_count(model: Path) -> int:
    """Return the number of parameters in a model folder's safetensors, by their headers; 0 if it has none.

    Raises:
        ConfigError: a file is none.
    """
    headers = map(read_safetensors_header, model.glob("*.safetensors"))
    return sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())


def _check(service: Service, gpu: Gpu, needed: float, held: str, there: float, what: str) -> None:
    if needed > there:
        raise ConfigError(
            f"launcher: {service.name} on {gpu} needs at least {needed / GIB:.2f} GiB: {held}; "
            f"allowed: {there / GIB:.2f} GiB, its {what} (docs/gpu.md#memory)"
        )
