"""Checks of a Hugging Face model folder, and the copying of what the trainer never opens. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from quartet_common.config import ConfigError
from quartet_common.model_folder import read_model_folder
from quartet_common.rope import at_most, fixed_rope_length

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
"""Copied, never loaded: the trainer sees token ids only, and transformers 4.51 cannot read every tokenizer."""

MODEL_DTYPES = ("float32", "bfloat16", "float16")


class ModelFolderError(ValueError):
    """The folder cannot be trained from; the text is one sentence that says why and what to do."""


def check_model_folder(path: Path) -> dict:
    """Check that transformers 4.51 will read the folder as it is meant, and return its config.json.

    Raises:
        ModelFolderError: what `read_model_folder` refuses, or a folder written by transformers 5.
    """
    try:
        config = read_model_folder(path)
    except ConfigError as error:
        raise ModelFolderError(str(error)) from error
    if "rope_parameters" in config or ("dtype" in config and "torch_dtype" not in config):
        # 4.51 would not see rope_theta there, and would take 10000 without a word.
        raise ModelFolderError(
            f"model.path: {path / 'config.json'} was written by transformers 5; the trainer reads the 4.51 form: write "
            "rope_theta (and rope_scaling) beside the other keys instead of rope_parameters, and torch_dtype for dtype"
        )
    if "text_config" in config:
        raise ModelFolderError(
            f"model.path: {path / 'config.json'} is of a model of several parts ({config.get('model_type')}); the "
            "trainer takes the language model alone, whose config.json has the keys of text_config at its top level"
        )
    dtype = config.get("torch_dtype") or "float32"
    if dtype not in MODEL_DTYPES:
        raise ModelFolderError(f"model.path: torch_dtype is {dtype!r}; allowed: {', '.join(MODEL_DTYPES)}")
    return config


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
