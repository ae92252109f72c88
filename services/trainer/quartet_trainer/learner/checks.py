"""Checks of model folders, settings and texts that need no torch: preflight makes them too."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError
from quartet_common.model_folder import at_most, fixed_rope_length, read_model_folder
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner_settings import LearnerSettings

_COMPANIONS = (
    *("*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.tiktoken", "*.spm", "vocab.*", "tokenization_*.py"),
    "additional_chat_templates/*.jinja",
)
_OF_THE_WEIGHTS = ("config.json", "*.index.json", "adapter_config.json", "trainer_state.json", "optimizer*")
"""Files that are not copied although they match `_COMPANIONS`: they are of the source's own weights or training."""

CRITIC_KEY = "trainer.algorithm.critic.model"  # the run file's, of a separate critic's folder
MODEL_DTYPES = ("float32", "bfloat16", "float16")


_GPT_NEOX = ("rotary_emb_base", "rotary_pct")
"""The keys of GPT-NeoX for `rope_theta` and `partial_rotary_factor` in transformers 4."""


class ModelFolderError(ValueError):
    """The folder cannot be trained from; the message is one sentence that says why and what to do."""


def check_model_folder(path: Path, key: str = "model.path", weights: bool = True) -> dict:
    """Check that transformers will read the folder, and return its config.json.

    Args:
        key: of the run file, for errors.
        weights: check them too.

    Raises:
        ModelFolderError: `read_model_folder` refuses it, it is a multimodal model, or has an unsupported dtype.
    """
    try:
        config = read_model_folder(path, key, weights=weights)
    except ConfigError as error:
        raise ModelFolderError(str(error)) from error
    if "text_config" in config:
        raise ModelFolderError(
            f"{key}: {path / 'config.json'} is of a multimodal model ({config.get('model_type')}); the "
            "trainer takes the language model alone, whose config.json has the keys of text_config at its top level"
        )
    if quantized := config.get("quantization_config"):
        raise ModelFolderError(
            f"{key}: the weights in {path} are quantized ({quantized.get('quant_method')}), and are not trained; name "
            "the model that they were made from"
        )
    classes = config.get("architectures") or ["CausalLM"]
    if not any(re.search("CausalLM|LMHead|ConditionalGeneration", name) for name in classes):
        raise ModelFolderError(f"{key}: {path} has a {classes[0]}; a causal language model is needed")
    if (dtype := model_dtype(config)) not in MODEL_DTYPES:
        raise ModelFolderError(f"{key}: dtype is {dtype!r}; allowed: {', '.join(MODEL_DTYPES)}")
    return config


def model_dtype(config: dict) -> str:
    """The dtype of the folder's weights. Before 4.56, transformers wrote it as `torch_dtype`."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def for_any_transformers(config: dict, dtype: str) -> dict:
    """A config.json that transformers 4 and 5 read alike, with weights of `dtype`.

    transformers 5 writes the rotary embedding into `rope_parameters`, which 4 ignores: it would silently use a
    `rope_theta` of 10000. So the keys that 4 reads are added, with the same values.
    """
    config = {**config, "dtype": dtype, "torch_dtype": dtype}
    rope = config.get("rope_parameters") or {}
    local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or rope
    theta, partial = _GPT_NEOX if config.get("model_type") == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    older = {
        theta: rope.get("rope_theta"),
        partial: rope.get("partial_rotary_factor"),
        "rope_local_base_freq": local.get("rope_theta"),
    }
    if rope.get("rope_type") == "longrope":  # 4 refuses other keys beside these
        older["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
        scaling = {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    older["rope_scaling"] = scaling if rope.get("rope_type", "default") != "default" else None
    return {**{key: value for key, value in older.items() if value is not None}, **config}


def check_completion_length(config: dict, max_new_tokens: int) -> None:
    """Raise ModelFolderError if completions of `max_new_tokens` are too long for the model's rotary embedding."""
    longest = fixed_rope_length(config)
    if longest is not None and max_new_tokens >= longest:
        raise ModelFolderError(
            f"run.sampling.max_new_tokens is {max_new_tokens}; allowed: with the prompt {at_most(longest)}"
        )


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files beside weights and config.json that `source` has: the tokenizer's, its chat templates and the
    generation defaults. The trainer never loads them: it handles token ids only."""
    for file in {file for pattern in _COMPANIONS for file in source.glob(pattern) if file.is_file()}:
        if not any(file.match(pattern) for pattern in _OF_THE_WEIGHTS):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


_OWN_ATTENTION = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping")
"""Keys of config.json of models whose attention is not plain causal attention over the whole sequence."""


def check_ranks(settings: LearnerSettings, ranks: int) -> None:
    """Raise LearnerError if tp_size * pp_size * sp_size does not divide the number of ranks."""
    tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
    if ranks % (tp * pp * sp):
        third = f" * trainer.sp_size {sp}" if sp > 1 else ""
        raise LearnerError(
            f"trainer.tp_size {tp} * trainer.pp_size {pp}{third} must divide the number of ranks, {ranks}"
        )


def check_recorded(settings: LearnerSettings, *, sampling_masks: bool, router_replay: bool) -> None:
    """Raise LearnerError if the run records sampling masks or experts that the plugin cannot use."""
    if settings.plugin != "hybrid_parallel":
        return
    for key, asked, shared in (
        ("sampling_masks", sampling_masks, "the vocabulary"),
        ("router_replay", router_replay, "layers and experts"),
    ):
        if asked:
            raise LearnerError(
                f"run.{key} is not possible with trainer.plugin 'hybrid_parallel', whose ranks share {shared}; "
                "allowed: another plugin, or false"
            )


def no_experts(model_type: str) -> LearnerError:
    """The error of a run with router replay whose model has no routed experts."""
    return LearnerError(
        f"run.router_replay is true; a '{model_type}' model has no experts that its routers choose by top-k scores; "
        "allowed: false"
    )


def check_model(config: Any, settings: LearnerSettings) -> None:
    """Raise LearnerError if a model cannot be spread as the settings say.

    `config` is transformers' PretrainedConfig, or has the keys of config.json as attributes.
    """
    tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        value = getattr(config, name, None)
        if value is None:  # left to transformers' default
            continue
        if value % tp:
            raise LearnerError(f"trainer.tp_size {tp} does not divide the model's {name}, {value}")
        if "heads" in name and value // tp % sp:
            raise LearnerError(
                f"trainer.tp_size {tp} * trainer.sp_size {sp} does not divide the model's {name}, {value}"
            )
    layers = getattr(config, "num_hidden_layers", None)
    if layers is not None and layers < pp:
        raise LearnerError(f"trainer.pp_size {pp} is more than the model's {layers} layers")
    own = [name for name in _OWN_ATTENTION if getattr(config, name, None)]
    if not getattr(config, "use_sliding_window", True):
        own = [name for name in own if name != "sliding_window"]
    if sp > 1 and own:
        raise LearnerError(
            f"trainer.sp_size {sp} is not possible with this model's attention, which has {own[0]} in config.json"
        )
