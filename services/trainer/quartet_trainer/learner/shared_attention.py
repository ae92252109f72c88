"""Attention of a model whose micro-batches have each prompt once; see `batches.shared_prompts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from quartet_trainer.batches.shared_prompts import SharedPrompts

_NAME = "quartet_shared_prompts"
_WINDOWS = ("sliding_window", "attention_chunk_size")


def shares_prompts(causal_lm: PreTrainedModel) -> bool:
    """Whether `use_shared_attention` had it do so."""
    return causal_lm.config._attn_implementation == _NAME


def use_shared_attention(causal_lm: PreTrainedModel) -> bool:
    """Have a model attend by `shared_attention`. False, and nothing is changed, if that is not how it attends."""
    config = causal_lm.config
    before = config._attn_implementation
    if before != "sdpa" or any(getattr(config, name, None) for name in _WINDOWS):
        return False
    AttentionInterface.register(_NAME, shared_attention)
    sequences = torch.arange(16).view(2, 8) % config.vocab_size
    sequences[1, :5] = sequences[0, :5]
    shared = SharedPrompts(
        positions=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6]]),
        parts=(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9, 0]]),),
        places=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 13, 14]),
    )
    with torch.no_grad():
        expected = causal_lm.base_model(input_ids=sequences, use_cache=False).last_hidden_state.flatten(0, 1)
        config._attn_implementation = _NAME
        try:
            found = last_hidden_state(causal_lm.base_model, sequences.flatten()[shared.places][None], shared)[0]
        except TypeError:  # a layer that takes no other arguments than its own
            found = torch.full_like(expected[shared.places], torch.nan)
    expected = expected[shared.places]
    if not (found - expected).abs().max() < 1e-3 * expected.abs().max():
        config._attn_implementation = before
    return shares_prompts(causal_lm)


def last_hidden_state(base_model: nn.Module, input_ids: Tensor, shared: SharedPrompts | None) -> Tensor:
    """The last hidden states [M, L, H] of a base model for `MicroBatch.input_ids` [M, L] and `MicroBatch.shared`."""
    if base_model.config._attn_implementation != _NAME:
        return base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    if shared is None:
        return base_model(input_ids=input_ids, attention_mask=_no_mask(input_ids), use_cache=False).last_hidden_state
    return base_model(
        input_ids=input_ids,
        attention_mask=_no_mask(input_ids),
        position_ids=shared.positions,
        use_cache=False,
        shared_prompts=shared,
    ).last_hidden_state


def _no_mask(input_ids: Tensor) -> Tensor:
    """What keeps transformers from making a mask: it leaves one of four dimensions as it is."""
    return torch.zeros(1, 1, 1, 1, device=input_ids.device)


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prompts: SharedPrompts | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention, of each sequence for itself where prompts are shared.

    Args:
        module: the layer's attention.
        query: [1, heads, S, size], or without `shared_prompts` [M, heads, L, size].
        key, value: the same of perhaps fewer heads.
        attention_mask: `_no_mask`, or one that transformers made, of rows without padding: the causal one.
        shared_prompts: how the S tokens make sequences.
        dropout, scaling: of the attention's weights, of its scores.

    Returns:
        The outputs, [1, S, heads, size] or [M, L, heads, size].
    """
    if shared_prompts is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, **kwargs)
    outputs = []
    for part in shared_prompts.parts:
        sequences = [_gather(tensor, part) for tensor in (query, key, value)]
        attended = scaled_dot_product_attention(
            *sequences, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, shared_prompts.places)[None], None


def _gather(states: Tensor, part: Tensor) -> Tensor:
    """From [1, heads, S, size] and int64 [m, l] to [m, heads, l, size].

    In float32 at least: a prompt's gradient is the sum over its completions.
    """
    tokens = states[0].transpose(0, 1)
    if tokens.dtype in (torch.bfloat16, torch.float16) and tokens.requires_grad:
        gathered = tokens.float().index_select(0, part.flatten()).to(tokens.dtype)
    else:
        gathered = tokens.index_select(0, part.flatten())
    return gathered.unflatten(0, part.shape).transpose(1, 2)
