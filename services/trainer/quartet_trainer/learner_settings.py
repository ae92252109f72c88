"""The learner's keys of the run file's `[trainer]` section. Imports no torch."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, field_validator, model_validator

from quartet_common.checkpoints import part_of
from quartet_common.presets import TRAINER_PRESETS, PresetName, with_preset
from quartet_common.python_file import FileError, describe, in_a_file, load_callable
from quartet_common.run_file import toml_value
from quartet_common.sections import Section
from quartet_trainer.algorithms import ALGORITHMS, DEFAULT, AnyAlgorithm, algorithm_class, read_algorithm
from quartet_trainer.errors import LearnerError

_SCHEDULES = ("constant", "cosine", "linear")
PluginName = Literal["torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel"]
LOWEST_TEMPERATURE = 1e-6
"""Lowest sampling temperature that can be trained on: logits divided by it stay finite in float32."""


_PEFT_NAMES = {"r": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora", "target_modules": "target_modules"}
_WITHOUT_EFFECT = (
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("megatron_core", "qalora_group_size", "lora_dropout"),
)
"""Keys of PEFT's configuration that do not change what a trained adapter computes."""
_ONLY_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Values of PEFT's configuration that are supported; of every other key only those that count as false. The other
initial values (pissa, olora, corda, loftq, lora_ga) change the base model, whose weights are not in the adapter."""


def _in_order(value: object) -> object:
    return sorted(value) if isinstance(value, list) else value


def _modules(value: object, check: ValidatorFunctionWrapHandler) -> Any:
    if value != "all-linear" and not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
        raise ValueError('allowed: a list of names, such as ["q_proj", "v_proj"], or "all-linear"')
    if isinstance(value, list) and (outer := {"lm_head", "embed_tokens"} & set(value)):
        raise ValueError(f"{min(outer)!r} cannot have an adapter: it may be tied to the other end of the model")
    return check(value)


class LoraSection(Section):
    """[trainer.lora]: train low-rank adapters of some matrices; the model's own weights stay fixed."""

    r: int = Field(default=0, ge=0, description="Rank of the adapters; 0: none, the whole model is trained.")
    alpha: float = Field(default=16.0, gt=0, description="An adapter's product is scaled by alpha / r.")
    use_rslora: bool = Field(default=False, description="Scale by alpha / sqrt(r) instead (rsLoRA).")
    target_modules: Annotated[list[str] | Literal["all-linear"], WrapValidator(_modules)] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="Last names of the linear layers that get an adapter; not lm_head, not embed_tokens. "
        '"all-linear": all but lm_head.',
    )

    path: Path | None = Field(
        default=None,
        description="PEFT adapter folder to start from, with the same r, alpha, use_rslora and target_modules; or a "
        "run's checkpoint, for the adapter in it. Unset: A is random and B is 0.",
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
            adapter = {"use_rslora": False, **json.loads(file.read_text(encoding="utf-8"))}
            held = {key: _in_order(adapter[name]) for key, name in _PEFT_NAMES.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"path: '{file}' is no configuration of a PEFT adapter: {error!r}") from error
        for key, value in adapter.items():
            allowed, known = _ONLY_VALUES.get(key, ()), key in (*_WITHOUT_EFFECT, *_PEFT_NAMES.values())
            if not known and value not in allowed and (value or allowed):
                raise ValueError(
                    f"path: the adapter in '{self.path}' has {key} = {json.dumps(value)}, which this trainer does not "
                    f"train; allowed: {', '.join(map(json.dumps, allowed)) or f'no {key}'}; or merge it into its base "
                    "model with PEFT, as model.path"
                )
        unlike = [
            f"{key} = {json.dumps(value)}" for key, value in held.items() if value != _in_order(getattr(self, key))
        ]
        if unlike:
            raise ValueError(f"path: the adapter in '{self.path}' has {', '.join(unlike)}; set lora's to the same")
        return self


HEAD_PLUGINS = ("torch_ddp", "low_level_zero")
"""Plugins under which the policy can have a value head."""


class PtxSection(Section):
    """[trainer.ptx]: a language-model loss on given rows, added to the policy's against forgetting."""

    coefficient: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Its weight c in (1 - c) * policy's loss + c * language-model loss; 0: none.",
    )
    data: Path | None = Field(
        default=None, description="JSONL of supervised rows (docs/sft.md): chats, completions, texts or token ids."
    )
    sequences_per_step: int = Field(default=8, ge=1, description="Rows per step, over all ranks.")


class ReferenceSection(Section):
    """[trainer.reference]: the model of the KL, and the teacher of a distillation without [run.teachers]."""

    model: Path | None = Field(
        default=None,
        description="Its folder, a run's checkpoint or a hub id, with the policy's tokens. Unset: the initial weights.",
    )

    @field_validator("model")
    @classmethod
    def _in_a_checkpoint(cls, path: Path | None) -> Path | None:
        return path and part_of(path, "model")


REFERENCE_KEY = "trainer.reference.model"
REFERENCE_PLUGINS = ("torch_ddp", "low_level_zero", "torch_fsdp")
"""Plugins under which the reference model can be another model than the policy's."""


class DistillationSection(Section):
    """[trainer.distillation]: the teacher's log-prob over the policy's as advantage of each token."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of log teacher - log policy in a token's advantage; 0: no distillation."
    )
    reward_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the algorithm's own advantage beside it; 0: rewards are only reported.",
    )


class LearnerSettings(Section):
    """How the policy is trained (`docs/algorithms.md`), and spread over the ranks (`docs/plugins.md`)."""

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
        description="What is sharded over data-parallel ranks: 1: the optimizer's state; 2: the gradients too. "
        "Unset: low_level_zero 1, hybrid_parallel nothing.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Keep the optimizer's state and its float32 weights in the host's memory and step there "
        "(low_level_zero, gemini, hybrid_parallel with zero_stage).",
    )
    lora: LoraSection = Field(default=LoraSection(), description="Low-rank adapters.")

    preset: PresetName | None = Field(
        default=None,
        description="Another program's defaults for the keys that are not set in this section: those of "
        "ColossalChat's -a GRPO, DAPO, REINFORCE_PPB or RLOO (docs/colossalchat.md).",
    )
    algorithm: AnyAlgorithm = Field(
        default=read_algorithm(DEFAULT),
        description="Advantage estimator and loss: one of docs/algorithms.md or of an installed package, by its name "
        "alone or with keys of its own.",
    )

    learning_rate: float = Field(default=1e-6, ge=0, description="Peak learning rate of AdamW.")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's decay rates, each in [0, 1).")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's denominator term.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay; never on norms and biases.")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradient norm to which a larger gradient is scaled; 0: never."
    )

    schedule: str = Field(
        default="constant",
        description="Learning rate after the warm-up: constant, cosine, linear, or a function of a Python file, "
        '"schedule.py:rate", that returns the factor of learning_rate for a step (from 0) and the steps in all.',
        json_schema_extra={"pattern": r"^(constant|cosine|linear|.+\.py:[A-Za-z_]\w*)$"},
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule_steps: int = Field(
        default=0, ge=0, description="Optimizer steps until the schedule's minimum, warm-up included; 0: run.max_steps."
    )
    min_learning_rate_ratio: float = Field(
        default=0.1, ge=0, le=1, description="The schedule's minimum over the peak; then the rate stays there."
    )

    kl_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the reference model, which is kept only if > 0."
    )
    reference_sync_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps after which the reference model takes the policy's weights; 0: it stays at the "
        "initial ones.",
    )
    reference: ReferenceSection = Field(default=ReferenceSection(), description="The reference model.")
    distillation: DistillationSection = Field(
        default=DistillationSection(), description="On-policy distillation (docs/distillation.md)."
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="train/kl towards which kl_coefficient is adapted from its value on. Unset: not.",
    )
    kl_horizon: int = Field(
        default=10_000, ge=1, description="Completions in which a KL far off multiplies kl_coefficient by about e^0.2."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy in the loss, as a bonus.")
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="train/entropy, in nats, up to which there is a bonus, whose coefficient is adapted from "
        "entropy_coefficient on. Unset: it is constant.",
    )
    entropy_coefficient_delta: float = Field(
        default=0.005, gt=0, description="What is added after a step at or below entropy_target, else subtracted."
    )
    entropy_coefficient_max: float = Field(
        default=1.0, gt=0, description="Most that entropy_coefficient becomes with entropy_target; the least is 0."
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Skip forward and backward of completions that cannot change the gradient (advantage 0, no KL).",
    )

    epochs: int = Field(default=1, ge=1, description="Passes over each batch.")
    mini_batches: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps of a pass: the batch's groups, shuffled, are dealt to as many mini-batches.",
    )

    ptx: PtxSection = Field(default=PtxSection(), description="Language-model loss beside the policy's.")

    micro_batch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Most tokens of one forward pass on one rank, padding and each completion's prompt included.",
    )
    max_padding: float = Field(
        default=0.08, ge=0, lt=1, description="Share of padding at which a micro-batch is cut, if it has enough tokens."
    )
    share_prompts: bool = Field(
        default=True,
        description="Compute a group's prompt once for its completions in a micro-batch, where plugin and model can.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward: less memory.")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        default="auto",
        description="Arithmetic of the model: bf16 keeps fp32 weights and log-softmax; fp64 is for numerical checks; "
        "auto is bf16 on CUDA and with gemini, else fp32.",
    )
    seed: int = Field(default=42, ge=0, description="Seed of the ranks' random generators.")

    @property
    def entropy_bonus(self) -> bool:
        """Whether the loss may have one."""
        return self.entropy_coefficient > 0 or self.entropy_target is not None

    def on(self, device: str) -> LearnerSettings:
        """Return the settings with `precision` resolved for "cuda" or "cpu"."""
        if self.precision != "auto":
            return self
        half = device == "cuda" or self.plugin == "gemini"
        return self.model_copy(update={"precision": "bf16" if half else "fp32"})

    @model_validator(mode="before")
    @classmethod
    def _below_what_is_written(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        _refuse_flat_keys(values, own=cls.model_fields)
        return with_preset(values)

    @field_validator("schedule")
    @classmethod
    def _schedule_is_there(cls, schedule: str) -> str:
        if schedule not in _SCHEDULES and not in_a_file(schedule):
            raise ValueError(f'allowed: {", ".join(_SCHEDULES)}, or a function of a Python file, "schedule.py:rate"')
        return schedule

    @field_validator("adam_betas")
    @classmethod
    def _betas_in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each must be in [0, 1), got {list(betas)}")
        return betas

    @model_validator(mode="after")
    def _plugin_can(self) -> LearnerSettings:
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

    @model_validator(mode="after")
    def _parts_fit(self) -> LearnerSettings:
        if self.plugin == "gemini" and self.precision not in ("auto", "bf16"):
            raise ValueError(
                f'precision: {self.precision!r} is not possible with plugin = "gemini", which computes in bf16; '
                'set precision = "bf16", or another plugin'
            )
        critic = self.algorithm.value_model()
        if critic and critic.form == "head" and self.plugin not in HEAD_PLUGINS:
            raise ValueError(
                f'algorithm: critic.form "head" needs plugin = "torch_ddp" or "low_level_zero", not {self.plugin!r}; '
                '"separate" goes with every plugin'
            )
        if self.ptx.coefficient and self.ptx.data is None:
            raise ValueError("ptx.data is missing: with ptx.coefficient > 0 it names a JSONL file of rows")
        return self

    @model_validator(mode="after")
    def _reference_is_there(self) -> LearnerSettings:
        if self.reference_sync_steps and not self.kl_coefficient:
            raise ValueError(
                "reference_sync_steps: without a KL there is no reference model; set kl_coefficient above 0, or leave "
                "it out"
            )
        model = self.reference.model
        if model is not None and not (self.kl_coefficient or self.distillation.coefficient):
            raise ValueError(
                f"reference.model: got '{model}', and nothing compares with it; set kl_coefficient or "
                "distillation.coefficient above 0, or leave it out"
            )
        if model is not None and self.reference_sync_steps:
            raise ValueError(
                "reference_sync_steps: with reference.model the reference is a model of its own; leave one of them out"
            )
        if model is not None and self.plugin not in REFERENCE_PLUGINS:
            raise ValueError(
                f"reference.model: with plugin = {self.plugin!r} the reference has the policy's own parts; allowed: "
                f"{', '.join(REFERENCE_PLUGINS)}; or a served teacher, [run.teachers]"
            )
        if self.distillation.reward_weight and not self.distillation.coefficient:
            raise ValueError("distillation.reward_weight: nothing is distilled; set distillation.coefficient above 0")
        if self.reference_sync_steps and self.lora.r:
            raise ValueError(
                "reference_sync_steps: with adapters the reference is the base model, which does not change; set 0, or "
                "lora.r = 0"
            )
        return self

    @model_validator(mode="after")
    def _coefficients_adapt(self) -> LearnerSettings:
        if self.kl_target is not None and not self.kl_coefficient:
            raise ValueError(
                "kl_target: it adapts kl_coefficient by factors; set kl_coefficient above 0, to begin with"
            )
        if self.entropy_target is not None and self.entropy_coefficient > self.entropy_coefficient_max:
            raise ValueError(
                f"entropy_coefficient: got {self.entropy_coefficient:g}; allowed with entropy_target: at most "
                f"entropy_coefficient_max, {self.entropy_coefficient_max:g}"
            )
        for key, target in (
            ("kl_horizon", "kl_target"),
            *((key, "entropy_target") for key in ("entropy_coefficient_delta", "entropy_coefficient_max")),
        ):
            if getattr(self, target) is None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: without {target} nothing is adapted; set {target}, or leave it out")
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> LearnerSettings:
        if self.schedule_steps and self.warmup_steps >= self.schedule_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be smaller than schedule_steps ({self.schedule_steps})"
            )
        return self


def _refuse_flat_keys(values: dict[str, Any], own: Container[str]) -> None:
    """Raise ValueError with the line to write, if [trainer], whose `own` keys are others, has keys of the algorithm."""
    moved = {"algorithm_parameters"}.union(*(kind.model_fields for kind in ALGORITHMS.values())) - {"name"}
    flat = {key: value for key, value in values.items() if key in moved and key not in own}
    preset = TRAINER_PRESETS.get(str(values.get("preset")), {"algorithm": {"name": DEFAULT}})
    table = values.get("algorithm", {})
    table = {"name": table} if isinstance(table, str) else table
    if not flat or not isinstance(table, dict):
        return
    table = {"name": preset["algorithm"]["name"], **table}
    try:
        takes = algorithm_class(str(table["name"])).model_fields
    except ValueError:  # said of the algorithm itself
        return
    given = {**flat, **dict(flat.get("algorithm_parameters", {}))}
    line = toml_value(table | {key: value for key, value in given.items() if key in takes})
    unused = ", ".join(key for key in given if key not in {*takes, "algorithm_parameters"})
    raise ValueError(
        f"algorithm: {', '.join(flat)} moved into its table; write algorithm = {line} in their place"
        + (f"; {unused} had no effect" if unused else "")
    )


def check_schedule(settings: LearnerSettings, max_steps: int) -> None:
    """Raise LearnerError if a falling schedule has no end, or ends within its warm-up.

    Args:
        settings: `schedule`, `warmup_steps`, `schedule_steps`.
        max_steps: steps of the run, the schedule's length if the settings have none; 0: unknown.
    """
    end = settings.schedule_steps or max_steps
    if in_a_file(settings.schedule):
        factor = schedule_in_file(settings.schedule, end)
        for step in {settings.warmup_steps, end // 2, max(end - 1, 0)}:
            factor(step)
    elif settings.schedule != "constant" and end <= settings.warmup_steps:
        raise LearnerError(
            f"trainer.schedule: a {settings.schedule} over {end} steps with {settings.warmup_steps} steps of warm-up "
            "has no room; set trainer.schedule_steps or run.max_steps above trainer.warmup_steps"
        )


def schedule_in_file(path: str, steps: int) -> Callable[[int], float]:
    """Return the schedule that a function of a file gives, called with a step and, if it takes that, all `steps`.

    It raises LearnerError, as this function does, with the file, the step and what was returned.
    """
    try:
        function = load_callable(path)
    except FileError as error:
        raise LearnerError(f"trainer.schedule: {error}") from error

    def factor(step: int) -> float:
        try:
            value = float(function(*(step, steps)[: len(inspect.signature(function).parameters)]))
        except Exception as error:  # it is the user's program
            what = describe(error, path.rpartition(":")[0])
            raise LearnerError(f"trainer.schedule: '{path}' {what['reason']} ({what['place']}), step {step}") from error
        if not 0 <= value < math.inf:
            raise LearnerError(f"trainer.schedule: '{path}' returned {value} for step {step}; allowed: 0 or above")
        return value

    return factor
