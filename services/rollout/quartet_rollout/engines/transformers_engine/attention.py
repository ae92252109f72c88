"""Attention of one new token for each row, and of prompts.

With fewer key and value heads than query heads, transformers copies every key and value for each of its query heads.
One new token per row needs no copies: the query heads of a key head become several queries to it. On the CPU two matrix
products are then faster than torch's fused attention: a step of a small model takes a fifth less time.
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
    """Make a model use `grouped_attention` if it uses torch's `scaled_dot_product_attention`."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)


def layer_kinds(config: Any) -> set[str]:
    """Return the kinds of attention in a model's layers. Raises EngineError for unsupported ones."""
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
    """Return the attention mask of one new token per row.

    Args:
        positions: int64 [rows]: each token's position.
        width: positions in the cache.
        kinds: from `layer_kinds`.
        window: of sliding attention.
        dtype: of an additive mask; None: a boolean mask, true where a token attends.

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
