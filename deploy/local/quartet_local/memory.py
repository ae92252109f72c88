"""A check that the GPUs of a run have enough memory for weights, gradients and optimizer state; activations are not
counted."""

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from quartet_common.config import ConfigError, LoadedConfig, load_config
from quartet_common.gpus import GIB, Gpu
from quartet_common.model_folder import read_safetensors_header
from quartet_common.presets import with_preset
from quartet_local.placement import Keys, RolloutKeys, Service, VllmKeys


class LoraKeys(Keys):
    """Of [trainer.lora]."""

    r: int = 0


class ReferenceKeys(Keys):
    """Of [trainer.reference]."""

    model: Path | None = None


class MemoryKeys(Keys):
    """The keys of [trainer] that determine a rank's memory."""

    plugin: str = "torch_ddp"
    precision: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int | None = None
    offload_optimizer: bool = False
    kl_coefficient: float = 0.0
    reference: ReferenceKeys = ReferenceKeys()
    lora: LoraKeys = LoraKeys()

    @model_validator(mode="before")
    @classmethod
    def _below_what_is_written(cls, values: object) -> object:
        return with_preset(values) if isinstance(values, dict) else values


def check_memory(services: Sequence[Service], config: LoadedConfig, overrides: Sequence[str]) -> None:
    """Check that each GPU has enough free memory for the rollout and the trainer placed on it.

    Args:
        overrides: those that `config` was loaded with.

    Raises:
        ConfigError: a GPU has too little; the message has the terms of the sum.
    """
    model = config.model.path
    if model is None or not model.is_dir():
        return  # the service's own check reports it
    held: dict[Gpu, list[tuple[str, float, str]]] = {}
    for service in services:
        own = [*overrides, *service.settings]
        for gpu in service.gpus or ():
            if service.kind == "rollout":
                rollout = load_config("rollout", RolloutKeys, config.path, own)
                needs = _rollout_needs(service, gpu, rollout.section, rollout.model.path or model)
            elif service.kind == "trainer":
                needs = _trainer_needs(service, load_config("trainer", MemoryKeys, config.path, own).section, model)
            else:
                continue
            _check(service.name, gpu, *needs, gpu.free, "free memory")
            held.setdefault(gpu, []).append((service.name, *needs))
    for gpu, sharing in held.items():
        names, sizes, words = zip(*sharing, strict=True)
        together = "; ".join(f"{name}: {word}" for name, word in zip(names, words, strict=True))
        _check(" and ".join(names), gpu, sum(sizes), together, gpu.free, "free memory")


def _rollout_needs(service: Service, gpu: Gpu, rollout: RolloutKeys, model: Path) -> tuple[float, str]:
    """Return the bytes that a rollout needs on a GPU, and the sum in words. Raises ConfigError.

    vLLM requires that its share of the GPU is free, and puts weights and KV cache into it; a KV cache of a configured
    size may exceed the share. The transformers engine has no limit, so only its weights count.
    """
    keys = rollout.vllm if rollout.engine == "vllm" else VllmKeys(kv_cache_gib=0)
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    size = {"auto": 0, "float32": 4}.get(keys.dtype, 2)
    weights = (parameter_count(model) * size or stored) * keys.data_parallel_size / len(service.gpus or ())
    own = f"weights {weights / GIB:.2f} GiB"
    if rollout.engine != "vllm":
        return weights, own
    share = f"rollout.vllm.gpu_memory_utilization ({keys.gpu_memory_utilization:g})"
    usable = keys.gpu_memory_utilization * gpu.memory
    _check(service.name, gpu, usable, share, gpu.free, "free memory")
    if keys.kv_cache_gib is None:
        _check(service.name, gpu, weights, own, usable, share)
        return usable, f"{share} of {gpu.memory / GIB:.1f} GiB"
    cache = f"KV cache {keys.kv_cache_gib:g} GiB (rollout.vllm.kv_cache_gib)"
    return weights + keys.kv_cache_gib * GIB, f"{own} + {cache}"


def _trainer_needs(service: Service, keys: MemoryKeys, model: Path) -> tuple[float, str]:
    """Return the bytes that a rank needs on its GPU, and the sum in words."""
    count, parts = parameter_count(model), rank_bytes(keys, len(service.gpus or ()))
    terms = " + ".join(f"{name} {size:.4g}" for name, size in parts.items() if size)
    return count * sum(parts.values()), f"{count / 1e9:.3g} billion parameters × ({terms}) bytes"


def rank_bytes(keys: MemoryKeys, ranks: int) -> dict[str, float]:
    """Return the least memory of a rank by kind, in bytes per parameter of the model (docs/plugins.md)."""
    sharded = keys.plugin in ("torch_fsdp", "gemini")  # weights, gradients and optimizer over all ranks
    half = keys.precision in ("auto", "bf16") and keys.plugin in ("low_level_zero", "hybrid_parallel", "gemini")
    size = 8 if keys.precision == "fp64" else 2 if half else 4
    zero = keys.zero_stage or (1 if keys.plugin == "low_level_zero" else 0)
    by_model = ranks if sharded else keys.tp_size * keys.pp_size
    by_optimizer = ranks if sharded or zero else by_model
    weights = size / by_model
    if keys.lora.r:  # an adapter's gradients and optimizer state are small
        return {"weights": weights}
    gradients = 0 if keys.plugin == "gemini" else size / (ranks if zero == 2 else by_model)
    moments = (16 if size == 8 else 8) / by_optimizer
    parts = {"weights": weights, "gradients": gradients}
    if not keys.offload_optimizer:
        parts |= {"float32 weights": half * 4 / by_optimizer, "Adam": moments}
    return {**parts, "reference model": weights if keys.kl_coefficient or keys.reference.model else 0}


def parameter_count(model: Path) -> int:
    """Return the number of parameters by the headers of a model folder's safetensors files; 0 if it has none.

    Raises:
        ConfigError: a file is not in that format.
    """
    headers = map(read_safetensors_header, model.glob("*.safetensors"))
    return sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())


def _check(name: str, gpu: Gpu, needed: float, held: str, there: float, what: str) -> None:
    if needed > there:
        raise ConfigError(
            f"launcher: {name} on {gpu} needs at least {needed / GIB:.2f} GiB: {held}; "
            f"allowed: {there / GIB:.2f} GiB, its {what} (docs/gpu.md#memory)"
        )
