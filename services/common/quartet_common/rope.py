"""Rotary position embeddings whose frequencies depend on the length of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fixed_rope_length(config: Mapping[str, Any]) -> int | None:
    """Longest sequence, in tokens, up to which a model's rotary frequencies are the same for every length.

    `longrope` has two lists of factors, for sequences up to `original_max_position_embeddings` and for longer ones;
    `dynamic` (NTK) scales its base beyond `max_position_embeddings`. Beyond that length transformers chooses by the
    longest row of the batch and vLLM by its `max_model_len`, so the same tokens get different log-probs.

    Args:
        config: the model's config.json, with `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5), for
            all layers or one for each type of layer.

    Returns:
        None: frequencies never depend on the length.
    """
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    context = text.get("max_position_embeddings")
    lengths = []
    for rope in (scaling, *scaling.values()):
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind in ("longrope", "su") and rope["short_factor"] != rope["long_factor"]:
            original = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            lengths.append(original or context)
        elif kind == "dynamic":
            lengths.append(context)
    return min((int(length) for length in lengths if length), default=None)


def at_most(length: int) -> str:
    """What an error message allows, where more tokens than `fixed_rope_length` are wanted."""
    return f"at most {length}, as beyond that rope_scaling in config.json makes log-probs depend on the batch"
