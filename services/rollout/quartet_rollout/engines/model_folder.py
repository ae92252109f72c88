"""What an engine reads from a Hugging Face model folder besides the weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from quartet_common.model_folder import at_most, fixed_rope_length
from quartet_rollout.errors import EngineError


def check_model_folder(model_path: str) -> None:
    """Raise EngineError unless the folder exists and has a config.json."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise EngineError(f"model folder '{model_path}' does not exist")
    if not (folder / "config.json").is_file():
        raise EngineError(f"model folder '{model_path}' has no config.json")


def context_length(model_path: str, key: str, wanted: int | None, within_positions: bool = False) -> int | None:
    """Return the engine's context: `wanted`, or if that is None the limit of the rotary embedding, if it has one.

    Args:
        within_positions: the engine does not go beyond the model's `max_position_embeddings`.

    Raises:
        EngineError: `wanted` is above the limit; the text names its `key` in the run file.
    """
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    longest = fixed_rope_length(config)
    if wanted is not None and longest is not None and wanted > longest:
        raise EngineError(f"{key} is {wanted}; allowed: {at_most(longest)}")
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    if within_positions and wanted and positions and wanted > positions:
        raise EngineError(f"{key} is {wanted}; allowed: at most the model's {positions}")
    return wanted or longest


def load_tokenizer(model_path: str, known: tuple[str, str] | None = None) -> Any:
    """Load the folder's tokenizer. Tokenizers are not thread-safe: load one per thread.

    `known`: module and name of its class. AutoTokenizer, which finds them, imports torch, which takes two seconds.
    """
    module, name = known or ("transformers", "AutoTokenizer")
    return getattr(importlib.import_module(module), name).from_pretrained(model_path, local_files_only=True)


def config_dtype(model_path: str) -> str:
    """Return the element type in config.json, e.g. "float32", the default. vLLM's own "auto" silently takes bfloat16
    for a float32 model."""
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(model_path, local_files_only=True).dtype
    return str(dtype or "float32").removeprefix("torch.")
