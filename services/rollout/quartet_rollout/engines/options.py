"""Options of the engines, as they stand in `[rollout.vllm]` and `[rollout.transformers]`. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class _EngineOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype = Field("auto", description="Element type of the weights; auto: as in the model's config.json.")
    max_model_len: int | None = Field(
        None, ge=2, description="Longest context in tokens, prompt and completion. Unset: what the model allows."
    )
    max_num_seqs: int = Field(256, ge=1, description="Completions generated at the same time.")
    threads: int = Field(1, ge=1, description="Torch threads on the CPU. More than one slows a shared machine down.")


class VllmOptions(_EngineOptions):
    """Options of the vllm engine."""

    form: Literal["in_process", "async"] = Field(
        "in_process",
        description="in_process: vLLM's engine core on a thread of this process; starts in seconds, one core or one "
        "GPU. async: vLLM's engine core in a process of its own, computing while this one works.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Workers that share each layer, a process and a GPU each; more than one: form async.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="Size of the KV cache in GiB. Unset: 0.5 on the CPU, gpu_memory_utilization decides on GPUs.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Fraction of a GPU's memory vLLM may use.")
    enforce_eager: bool | None = Field(
        None, description="Run without torch.compile and CUDA graphs. Unset: true on the CPU, false on GPUs."
    )
    enable_prefix_caching: bool = Field(True, description="Share the KV cache of equal prompt beginnings.")
    sleep_mode: bool = Field(
        False, description="Allocate so that the engine can sleep and give its GPU memory to a trainer. Needs a GPU."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("error", description="Level of vLLM's own logs.")

    @model_validator(mode="after")
    def _workers_have_processes(self) -> Self:
        if self.tensor_parallel_size > 1 and self.form != "async":
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} with form '{self.form}'; allowed: form 'async', "
                "whose workers are processes, or tensor_parallel_size 1"
            )
        return self


class TransformersOptions(_EngineOptions):
    """Options of the transformers engine."""

    device: str = Field("auto", description="Torch device, e.g. cpu or cuda:0; auto: a GPU if there is one.")
    max_prefill_tokens: int = Field(
        8192, ge=1, description="Prompt tokens (padding included) computed in one forward pass; bounds its memory."
    )
