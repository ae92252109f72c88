"""Attention of one new token for each row, and of prompts.

With fewer key and value heads than query heads, transformers copies every key and value for each query head that looks
at it. A row's one new token needs no copies: the query heads of a key head are so many queries to it. On the CPU two
products of matrices are then faster than torch's fused attention, by a fifth of the whole step of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from quartet_rollout.errors import EngineError

GROUPED = "quartet_grouped"
_LAYERS = ("full_attention", "sliding_attention")


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [rows, heads, tokens, size] to [rows, tokens, heads, size]."""
    rows, heads, tokens, _ = query.shape
    plain = kwargs.get("position_bias") is None
    if tokens > 1 or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    groups = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if query.device.type == "cpu" and attention_mask is not None and attention_mask.dtype == query.dtype:
        scores = torch.matmul(groups * scale, key.transpose(-1, -2)).add_(attention_mask)
        output = torch.matmul(torch.softmax(scores, dim=-1), value)
    else:
        output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scale)
    return output.reshape(rows, 1, heads, output.shape[-1]), None


def use_grouped(model: Any) -> None:
    """Have a model use it, if it would use torch's `scaled_dot_product_attention` otherwise."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)


def layer_kinds(config: Any) -> set[str]:
    """The kinds of attention of a model's layers. Raises EngineError naming one that has no keys and values to keep."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"} if getattr(config, "use_sliding_window", True) else kinds
    if other := kinds - set(_LAYERS):
        layers = f"layers of kind {', '.join(sorted(other))}; allowed: {', '.join(_LAYERS)}"
        raise EngineError(f"the transformers engine cannot run this model: {layers}; use the vllm engine")
    return kinds


def step_mask(
    positions: torch.Tensor, width: int, kinds: set[str], window: int | None, dtype: torch.dtype | None
) -> torch.Tensor | dict[str, torch.Tensor]:
    """What each row's token, at its position, may look at.

    Args:
        positions: int64 [rows].
        width: positions of the cache.
        kinds: `layer_kinds`.
        window: of sliding attention.
        dtype: of a mask that is added to scores; None: a mask that says which may be looked at.

    Returns:
        [rows, 1, 1, width], or with several kinds of layers one for each.
    """
    columns = torch.arange(width, device=positions.device)
    seen = columns <= positions[:, None]
    masks = {}
    for kind in sorted(kinds):
        mask = seen
        if kind == "sliding_attention" and window is not None:
            mask = seen & (columns > positions[:, None] - window)
        if dtype is not None:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        masks[kind] = mask[:, None, None, :]
    return masks if len(masks) > 1 else masks.popitem()[1]
