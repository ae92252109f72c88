"""The learner's keys of the run file's `[trainer]` section. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from quartet_common.config import Section

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "dapo"]
AggregationName = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]

PLUGINS_BUILT = ("torch_ddp",)
PLUGINS_KNOWN = ("torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel")


class LearnerSettings(Section):
    """How the policy is trained. `docs/algorithms.md` explains each term."""

    algorithm: AlgorithmName = Field(default="grpo", description="Advantage estimator and loss, as one named whole.")

    learning_rate: float = Field(default=1e-6, ge=0, description="Peak learning rate of AdamW.")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's decay rates, each in [0, 1).")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's denominator term.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay; never on norms and biases.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Gradient norm above which it is scaled; 0: never.")

    schedule: Literal["constant", "cosine"] = Field(default="constant", description="Learning rate after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule_steps: int = Field(
        default=0, ge=0, description="Optimizer steps until the cosine's minimum, warm-up included; 0: run.max_steps."
    )
    min_learning_rate_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Cosine's minimum over the peak; the rate stays there for good."
    )

    clip_low: float | None = Field(
        default=None, ge=0, le=1, description="Ratio is clipped below 1 - this. Unset: the algorithm's (0.2)."
    )
    clip_high: float | None = Field(
        default=None, ge=0, description="Ratio is clipped above 1 + this. Unset: the algorithm's (0.2; dapo 0.28)."
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the k3 KL to the first weights; a reference model is kept only if > 0.",
    )
    aggregation: AggregationName | None = Field(
        default=None, description="How token losses make one number. Unset: the algorithm's."
    )
    std_epsilon: float = Field(default=1e-4, gt=0, description="Added to the group's standard deviation (GRPO, DAPO).")
    mask_truncated: bool | None = Field(
        default=None, description="Leave truncated completions out of the loss. Unset: the algorithm's (dapo: true)."
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Spare forward and backward of completions that cannot move the gradient (advantage 0, no KL).",
    )

    old_log_probs: Literal["rollout", "recompute"] = Field(
        default="rollout",
        description="Denominator of the ratio: the rollout's log-probs, or the trainer's own before the step.",
    )
    tis_cap: float = Field(
        default=2.0,
        ge=0,
        description="Cap of the truncated importance weight of recomputed over rollout log-probs; 0: no such weight.",
    )

    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="Most tokens, padding included, of one forward pass on one rank."
    )
    max_padding: float = Field(
        default=0.08, ge=0, lt=1, description="Share of padding at which a micro-batch is cut, if it has enough tokens."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward: less memory.")
    precision: Literal["fp32", "bf16", "fp64"] = Field(
        default="fp32",
        description="Arithmetic of the model. bf16 keeps fp32 weights and log-softmax; fp64 is for numerical checks.",
    )
    plugin: str = Field(default="torch_ddp", description="ColossalAI plugin.")
    seed: int = Field(default=42, ge=0, description="Seed of the ranks' random generators.")

    @field_validator("adam_betas")
    @classmethod
    def _betas_in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each must be in [0, 1), got {list(betas)}")
        return betas

    @field_validator("plugin")
    @classmethod
    def _plugin_is_built(cls, plugin: str) -> str:
        if plugin in PLUGINS_BUILT:
            return plugin
        if plugin in PLUGINS_KNOWN:
            raise ValueError(f"{plugin!r} is not built yet; built: {', '.join(PLUGINS_BUILT)}")
        raise ValueError(f"{plugin!r} is no ColossalAI plugin; built: {', '.join(PLUGINS_BUILT)}")

    @model_validator(mode="after")
    def _warmup_fits(self) -> LearnerSettings:
        if self.schedule_steps and self.warmup_steps >= self.schedule_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be smaller than schedule_steps ({self.schedule_steps})"
            )
        return self
