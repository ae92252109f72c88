"""Attention of a model whose micro-batches have each prompt once; see `batches.shared_prompts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from quartet_trainer.batches.shared_prompts import Part, SharedPrompts

_NAME = "quartet_shared_prompts"
WINDOWS = ("sliding_window", "attention_chunk_size")


def shares_prompts(causal_lm: PreTrainedModel) -> bool:
    """Whether `use_shared_attention` had it do so."""
    return causal_lm.config._attn_implementation == _NAME


def use_shared_attention(causal_lm: PreTrainedModel) -> bool:
    """Have a model attend by `shared_attention`. False, and nothing is changed, if that is not how it attends."""
    config = causal_lm.config
    before = config._attn_implementation
    if before != "sdpa" or any(getattr(config, name, None) for name in WINDOWS):
        return False
    AttentionInterface.register(_NAME, shared_attention)
    sequences = torch.arange(16).view(2, 8) % config.vocab_size
    sequences[1, :5] = sequences[0, :5]
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9, 0]])
    shared = SharedPrompts(
        positions=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6]]),
        parts=(Part(places, places),),
        places=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 13, 14]),
    )
    input_ids = sequences.flatten()[shared.places][None]

    def same() -> bool:
        try:
            found = [
                last_hidden_state(trunk(causal_lm), input_ids, shared)[0],
                last_hidden_state(trunk(causal_lm), sequences, None).flatten(0, 1)[shared.places],
            ]
        except Exception:  # a model that takes no such argument, or no such mask: each says so by another error
            return False
        return all(bool((one - expected).abs().max() < 1e-3 * expected.abs().max()) for one in found)

    with torch.no_grad():
        expected = trunk(causal_lm)(input_ids=sequences, use_cache=False).last_hidden_state.flatten(0, 1)
        expected = expected[shared.places]
        config._attn_implementation = _NAME
        shares = same()
    if not shares:
        config._attn_implementation = before
    return shares


def trunk(causal_lm: PreTrainedModel) -> nn.Module:
    """The model below the output layer. Gemma 3 and Llama 4 name it otherwise than their `base_model` says."""
    base = causal_lm.base_model
    return causal_lm.get_decoder() if base is causal_lm else base


def last_hidden_state(base_model: nn.Module, input_ids: Tensor, shared: SharedPrompts | None) -> Tensor:
    """The last hidden states [M, L, H] of a base model for `MicroBatch.input_ids` [M, L] and `MicroBatch.shared`."""
    return base_output(base_model, input_ids, shared).last_hidden_state


def base_output(base_model: nn.Module, input_ids: Tensor, shared: SharedPrompts | None, **wanted: bool) -> Any:
    """What a base model gives for `MicroBatch.input_ids` [M, L] and `MicroBatch.shared`, and whatever else is `wanted`
    of it, e.g. `output_router_logits`."""
    given: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **wanted}
    if base_model.config._attn_implementation == _NAME:
        given["attention_mask"] = no_mask(input_ids)
        # OPT would take positions from a mask.
        given["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if shared is not None:
            given |= {"position_ids": shared.positions, "shared_prompts": shared}
    return base_model(**given)


def no_mask(input_ids: Tensor) -> Tensor:
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
        attention_mask: `no_mask`, or one that transformers made, of rows without padding: the causal one.
        shared_prompts: how the S tokens make sequences.
        dropout, scaling: of the attention's weights, of its scores.

    Returns:
        The outputs, [1, S, heads, size] or [M, L, heads, size].
    """
    if shared_prompts is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, **kwargs)
    queries_of_key = query.shape[1] // key.shape[1]
    if queries_of_key > 1 and not _takes_fewer_keys(query, shared_prompts):
        key, value = (states.repeat_interleave(queries_of_key, dim=1) for states in (key, value))
        queries_of_key = 1
    outputs = []
    for part in shared_prompts.parts:
        attended = scaled_dot_product_attention(
            _gather(query, part.queries),
            _gather(key, part.keys),
            _gather(value, part.keys),
            attn_mask=part.mask,
            dropout_p=dropout,
            is_causal=part.mask is None,
            scale=scaling,
            enable_gqa=queries_of_key > 1,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, shared_prompts.places)[None], None


def _takes_fewer_keys(query: Tensor, shared_prompts: SharedPrompts) -> bool:
    """Whether a kernel that does not hold all scores at once takes keys of fewer heads than the queries.

    On CUDA only flash attention does, and that takes no float32 and no mask.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    masked = any(part.mask is not None for part in shared_prompts.parts)
    return kind == "cpu" or (dtype in (torch.bfloat16, torch.float16) and not masked)


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """From [1, heads, S, size] and int64 [m, l] to [m, heads, l, size].

    In float32 at least: a prompt's gradient is the sum over its completions.
    """
    tokens = states[0].transpose(0, 1)
    if tokens.dtype in (torch.bfloat16, torch.float16) and tokens.requires_grad:
        gathered = tokens.float().index_select(0, places.flatten()).to(tokens.dtype)
    else:
        gathered = tokens.index_select(0, places.flatten())
    return gathered.unflatten(0, places.shape).transpose(1, 2)
