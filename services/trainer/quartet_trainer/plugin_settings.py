"""The keys of `[trainer]` that choose how the model is spread over the ranks. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from quartet_common.checkpoints import part_of
from quartet_common.config import Section

PluginName = Literal["torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel"]


_PEFT_NAMES = {"r": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
_NOT_TRAINED = (
    *("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("lora_bias", "fan_in_fan_out"),
)
"""Keys of PEFT's configuration that make another adapter than A and B of every target module."""


def _in_order(value: object) -> object:
    return sorted(value) if isinstance(value, list) else value


class LoraSection(Section):
    """[trainer.lora]: train low-rank adapters of some matrices and leave the model as it is."""

    r: int = Field(default=0, ge=0, description="Rank of the adapters; 0: none, the whole model is trained.")
    alpha: float = Field(default=16.0, gt=0, description="An adapter's product is scaled by alpha / r.")
    target_modules: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="Last names of the linear layers that get an adapter; not lm_head, not embed_tokens.",
    )

    path: Path | None = Field(
        default=None,
        description="PEFT adapter folder to start from, of the same r, alpha and target_modules; or a checkpoint of a "
        "run's, for the adapter in it. Unset: A is drawn and B is 0.",
    )

    @field_validator("path")
    @classmethod
    def _in_a_checkpoint(cls, path: Path | None) -> Path | None:
        return path and part_of(path, "adapter")

    @model_validator(mode="after")
    def _as_in_the_folder(self) -> LoraSection:
        if self.path is None:
            return self
        file = self.path / "adapter_config.json"
        try:
            adapter = json.loads(file.read_text(encoding="utf-8"))
            held = {key: _in_order(adapter[name]) for key, name in _PEFT_NAMES.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"path: '{file}' is no configuration of a PEFT adapter: {error!r}") from error
        if other := [key for key in _NOT_TRAINED if adapter.get(key)]:
            raise ValueError(f"path: the adapter in '{self.path}' has {other[0]}, which this trainer does not train")
        unlike = [
            f"{key} = {json.dumps(value)}" for key, value in held.items() if value != _in_order(getattr(self, key))
        ]
        if unlike:
            raise ValueError(f"path: the adapter in '{self.path}' has {', '.join(unlike)}; set lora's to the same")
        return self

    @field_validator("target_modules")
    @classmethod
    def _inner_layers(cls, names: list[str]) -> list[str]:
        if outer := {"lm_head", "embed_tokens"} & set(names):
            raise ValueError(f"{min(outer)!r} cannot have an adapter: it may be tied to the other end of the model")
        return names


class PluginSettings(Section):
    """How the model and the batch are spread over the ranks. `docs/plugins.md` says what runs where."""

    plugin: PluginName = Field(default="torch_ddp", description="ColossalAI plugin.")
    tp_size: int = Field(default=1, ge=1, description="Ranks that share each layer's matrices (hybrid_parallel).")
    pp_size: int = Field(default=1, ge=1, description="Stages of consecutive layers (hybrid_parallel).")
    sp_size: int = Field(
        default=1,
        ge=1,
        description="Ranks that share each sequence, and exchange positions for heads in attention (hybrid_parallel).",
    )
    zero_stage: Literal[1, 2] | None = Field(
        default=None,
        description="What data-parallel ranks share out: 1 the optimizer's state, 2 the gradients too. "
        "Unset: low_level_zero 1, hybrid_parallel nothing.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Keep the optimizer's state and its float32 weights in the host's memory and step there "
        "(low_level_zero, gemini, hybrid_parallel with zero_stage).",
    )
    lora: LoraSection = Field(default=LoraSection(), description="Low-rank adapters.")

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, values: Any) -> Any:
        """Of an earlier release, where one of ColossalAI's modes could be named."""
        if not isinstance(values, dict) or "sequence_parallel" not in values:
            return values
        if (mode := values["sequence_parallel"]) not in (None, "all_to_all"):
            raise ValueError(f"sequence_parallel: got {mode!r}; the one mode is all_to_all, of sp_size ranks")
        return {key: value for key, value in values.items() if key != "sequence_parallel"}

    @model_validator(mode="after")
    def _plugin_can(self) -> PluginSettings:
        for name in ("tp_size", "pp_size", "sp_size"):
            if getattr(self, name) > 1 and self.plugin != "hybrid_parallel":
                raise ValueError(f'{name}: {getattr(self, name)} needs plugin = "hybrid_parallel", not {self.plugin!r}')
        if self.zero_stage and self.plugin not in ("low_level_zero", "hybrid_parallel"):
            raise ValueError(
                f'zero_stage: {self.zero_stage} needs plugin = "low_level_zero" or "hybrid_parallel", '
                f"not {self.plugin!r}"
            )
        if self.zero_stage == 2 and self.pp_size > 1:
            raise ValueError(
                f"zero_stage: 2 exchanges gradients with every micro-batch; with pp_size {self.pp_size} "
                "only 1 is possible"
            )
        zero = self.plugin in ("low_level_zero", "gemini") or (self.plugin == "hybrid_parallel" and self.zero_stage)
        if self.offload_optimizer and not zero:
            raise ValueError(
                'offload_optimizer: true needs plugin = "low_level_zero" or "gemini", or "hybrid_parallel" with '
                f"zero_stage, not {self.plugin!r} alone"
            )
        if self.lora.r and self.plugin not in ("torch_ddp", "low_level_zero", "hybrid_parallel"):
            raise ValueError(
                'lora.r: adapters need plugin = "torch_ddp", "low_level_zero" or "hybrid_parallel", '
                f"not {self.plugin!r}"
            )
        if self.lora.r and self.tp_size > 1:
            raise ValueError(
                f"lora.r: with adapters tp_size must be 1, not {self.tp_size}; pp_size and sp_size are free"
            )
        return self
