"""Options of the engines, as they stand in `[rollout.vllm]` and `[rollout.transformers]`. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(BaseModel):
    """What both engines have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype = Field("auto", description="Element type of the weights; auto: as in the model's config.json.")
    max_model_len: int | None = Field(
        None, ge=2, description="Longest context in tokens, prompt and completion. Unset: what the model allows."
    )
    max_num_seqs: int = Field(256, ge=1, description="Completions generated at the same time.")
    threads: int = Field(1, ge=1, description="Torch threads on the CPU. More than one slows a shared machine down.")
    place: Literal["auto", "process", "thread"] = Field(
        "auto",
        description="Where it computes: in a process of its own, or on a thread of the rollout, which then shares its "
        "Python interpreter. auto: a process on the CPU, a thread on GPUs.",
    )


class VllmOptions(EngineOptions):
    """Options of the vllm engine."""

    form: Literal["in_process", "async"] = Field(
        "in_process",
        description="in_process: vLLM's engine core, stepped by us; starts in seconds, one core or one GPU. async: "
        "vLLM's engine core in processes as vLLM starts them, computing ahead.",
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
    def _one_process_is_enough(self) -> Self:
        if self.form == "async" and self.place == "process":
            raise ValueError(
                "place is 'process' with form 'async', which has processes of its own; allowed: thread, auto"
            )
        return self

    @model_validator(mode="after")
    def _workers_have_processes(self) -> Self:
        if self.tensor_parallel_size > 1 and self.form != "async":
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} with form '{self.form}'; allowed: form 'async', "
                "whose workers are processes, or tensor_parallel_size 1"
            )
        return self


class TransformersOptions(EngineOptions):
    """Options of the transformers engine."""

    device: str = Field("auto", description="Torch device, e.g. cpu or cuda:0; auto: a GPU if there is one.")
    max_prefill_tokens: int = Field(
        8192, ge=1, description="Prompt tokens (padding included) computed in one forward pass; bounds its memory."
    )
