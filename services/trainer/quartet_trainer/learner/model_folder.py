"""Checks of a Hugging Face model folder, and the copying of what the trainer never opens. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from quartet_common.config import ConfigError
from quartet_common.model_folder import at_most, fixed_rope_length, read_model_folder

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied, never loaded: the trainer sees token ids only."""

MODEL_DTYPES = ("float32", "bfloat16", "float16")


_GPT_NEOX = ("rotary_emb_base", "rotary_pct")
"""What transformers 4 called `rope_theta` and `partial_rotary_factor` there."""


class ModelFolderError(ValueError):
    """The folder cannot be trained from; the text is one sentence that says why and what to do."""


def check_model_folder(path: Path, key: str = "model.path", weights: bool = True) -> dict:
    """Check that transformers will read the folder, and return its config.json.

    Args:
        key: of the run file, for errors.
        weights: check them too.

    Raises:
        ModelFolderError: what `read_model_folder` refuses, a model of several parts, or of another dtype.
    """
    try:
        config = read_model_folder(path, key, weights=weights)
    except ConfigError as error:
        raise ModelFolderError(str(error)) from error
    if "text_config" in config:
        raise ModelFolderError(
            f"{key}: {path / 'config.json'} is of a model of several parts ({config.get('model_type')}); the "
            "trainer takes the language model alone, whose config.json has the keys of text_config at its top level"
        )
    if (dtype := model_dtype(config)) not in MODEL_DTYPES:
        raise ModelFolderError(f"{key}: dtype is {dtype!r}; allowed: {', '.join(MODEL_DTYPES)}")
    return config


def model_dtype(config: dict) -> str:
    """The dtype of the folder's weights, which is `torch_dtype` in folders that transformers before 4.56 wrote."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def for_any_transformers(config: dict, dtype: str) -> dict:
    """A config.json that transformers 4 and 5 read alike, with weights of `dtype`.

    transformers 5 has the rotary embedding in `rope_parameters`, of which 4 takes nothing: it would fall back to a
    `rope_theta` of 10000 without an error. What 4 reads is added; 5 finds the same in both.
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
    """Copy the files beside weights and config.json that `source` has: the tokenizer's and the generation defaults."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
