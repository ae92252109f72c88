"""Options of the engines: `[rollout.vllm]` and `[rollout.transformers]`. Imports no torch."""

from __future__ import annotations

import ast
from difflib import get_close_matches
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quartet_common.log import get_logger

log = get_logger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineParameters(BaseModel):
    """Options of every engine; those of other packages are set in `[rollout.engine_parameters]`. Unknown keys are
    rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_model_len: int | None = Field(
        None, ge=2, description="Longest context in tokens, prompt and completion. Unset: what the model allows."
    )
    threads: int = Field(1, ge=1, description="Torch threads on the CPU. More than one slows a shared machine down.")


class EngineOptions(EngineParameters):
    """Options of both engines of this package."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, values: Any) -> Any:
        if isinstance(values, dict) and (old := values.keys() & {"form", "place"}):
            log.warning("%s: leave the key out; both engines compute in processes of their own now", min(old))
            return {key: value for key, value in values.items() if key not in old}
        return values

    dtype: Dtype = Field("auto", description="Element type of the weights; auto: as in the model's config.json.")
    max_num_seqs: int = Field(256, ge=1, description="Completions generated at the same time.")


RESERVED = {
    "model": "model.path",
    "logprobs_mode": "the rollout, which needs processed log-probs",
    "worker_extension_cls": "the rollout, for weight updates and sampling masks",
    "weight_transfer_config": "the rollout, for weight updates",
    "enable_sleep_mode": "rollout.vllm.sleep_mode",
    "disable_log_stats": "the rollout, which reads the statistics",
}
"""Engine arguments of vLLM that the run file may not set, and what sets them."""


@cache
def vllm_arguments() -> frozenset[str]:
    """Return the fields of the installed vLLM's `AsyncEngineArgs`, parsed from its source because importing it takes
    seconds. Empty without vLLM."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    source = Path(found.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return frozenset(
        each.target.id
        for node in classes
        if node.name in ("EngineArgs", "AsyncEngineArgs")
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )


class VllmOptions(EngineOptions):
    """Options of the vllm engine. Other keys are passed to vLLM's `AsyncEngineArgs`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    tensor_parallel_size: int = Field(1, ge=1, description="Workers that share each layer, a process and a GPU each.")
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
    def _engine_arguments_exist(self) -> Self:
        given = self.model_extra or {}
        for key in given.keys() & RESERVED.keys():
            raise ValueError(f"{key}: it is set by {RESERVED[key]}; leave the key out")
        if given and (arguments := vllm_arguments()):
            known = {*arguments, *type(self).model_fields} - RESERVED.keys()
            for key in sorted(given.keys() - known):
                close = get_close_matches(key, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                release = version(packages_distributions()["vllm"][0])
                raise ValueError(f"{key}: vLLM {release} has no such engine argument{hint}")
        return self


class TransformersOptions(EngineOptions):
    """Options of the transformers engine."""

    device: str = Field("auto", description="Torch device, e.g. cpu or cuda:0; auto: a GPU if there is one.")
    max_prefill_tokens: int = Field(
        8192, ge=1, description="Prompt tokens (padding included) computed in one forward pass; bounds its memory."
    )
