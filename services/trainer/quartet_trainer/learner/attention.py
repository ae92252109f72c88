"""Attention over a packed row, registered with transformers; see `batch.collate`.

On CUDA it is torch's variable-length attention, without padding, if its kernel supports the head size. Otherwise it is
SDPA over padded blocks with a mask, or an explicit softmax for caps and sinks, which SDPA does not support.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quartet_trainer.batch.collate import Packing

_NAME = "quartet_packed"
_FUSED = (torch.bfloat16, torch.float16)
_PROBED = {"sliding_window": 3, "attention_chunk_size": 3, "attn_logit_softcapping": 0.5}
"""Values so small that a few tokens show whether a model passes them to its attention function."""
_PROBED_SCALE = 1000.0
"""Scale of scores while a cap is probed: with small weights, scores would not reach it."""


def attends_packed(causal_lm: PreTrainedModel) -> bool:
    """Whether `use_packed_attention` has taken effect on a model."""
    return causal_lm.config._attn_implementation == _NAME


def use_packed_attention(causal_lm: PreTrainedModel) -> bool:
    """Make a model use `packed_attention`. If its outputs would differ, leave the model as it is and return False."""
    config = causal_lm.config
    before = config._attn_implementation
    if before not in ("sdpa", "eager"):
        return False
    AttentionInterface.register(_NAME, packed_attention)
    sequences = torch.arange(16).view(2, 8) % config.vocab_size
    sequences[1, :5] = sequences[0, :5]
    packing = Packing(  # 5 tokens of a prompt, then 3 of each completion
        positions=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7]]),
        query_starts=torch.tensor([0, 5, 8, 11]).int(),
        keys=torch.tensor([*range(5), *range(8), *range(5), 8, 9, 10]),
        key_starts=torch.tensor([0, 5, 13, 21]).int(),
        longest_query=5,
        longest_key=8,
    )
    places = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 13, 14, 15])

    def same() -> bool:
        config._attn_implementation = before
        expected = trunk(causal_lm)(input_ids=sequences, use_cache=False).last_hidden_state.flatten(0, 1)[places]
        config._attn_implementation = _NAME
        try:
            found = [
                last_hidden_state(trunk(causal_lm), sequences.flatten()[places][None], packing)[0],
                last_hidden_state(trunk(causal_lm), sequences, None).flatten(0, 1)[places],
            ]
        except Exception:  # models that do not accept the arguments or the mask raise all kinds of errors
            return False
        return all(bool((one - expected).abs().max() < 1e-3 * expected.abs().max()) for one in found)

    with torch.no_grad():
        shares = same()
        with _probed_values(causal_lm) as changed:
            shares = shares and (not changed or same())
    if not shares:
        config._attn_implementation = before
    return shares


@contextmanager
def _probed_values(causal_lm: PreTrainedModel) -> Iterator[bool]:
    """A context in which a model's windows, chunks and caps have the values of `_PROBED`; yields whether it has any."""
    before = [
        (one, name, value)
        for one in (causal_lm.config, *causal_lm.modules())
        for name in _PROBED
        if isinstance(value := vars(one).get(name), int | float) and value
    ]
    capped = [one for one, name, _ in before if name == "attn_logit_softcapping" and hasattr(one, "scaling")]
    before += [(one, "scaling", one.scaling) for one in capped]
    for one, name, _ in before:
        setattr(one, name, _PROBED.get(name, _PROBED_SCALE))
    try:
        yield bool(before)
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def trunk(causal_lm: PreTrainedModel) -> nn.Module:
    """The model below the output layer, which `base_model` does not find for Gemma 3 and Llama 4."""
    named = (causal_lm.base_model, causal_lm.get_decoder())
    return next((module for module in named if module is not causal_lm), None) or causal_lm.model


def last_hidden_state(base_model: nn.Module, input_ids: Tensor, packing: Packing | None) -> Tensor:
    """The last hidden states [M, L, H] of a base model for `MicroBatch.input_ids` [M, L] and `MicroBatch.packing`."""
    return base_output(base_model, input_ids, packing).last_hidden_state


def base_output(base_model: nn.Module, input_ids: Tensor, packing: Packing | None, **wanted: bool) -> Any:
    """The output of a base model for `MicroBatch.input_ids` [M, L] and `MicroBatch.packing`. `wanted` are options of
    its forward pass, e.g. `output_router_logits`."""
    if base_model.config._attn_implementation != _NAME:
        return base_model(input_ids=input_ids, use_cache=False, **wanted)
    rows, length = input_ids.shape
    packing = packing or Packing.of_rows(rows, length, input_ids.device)
    output = base_model(
        input_ids=input_ids.reshape(1, -1),
        use_cache=False,
        attention_mask=no_mask(input_ids),
        position_ids=packing.positions,
        packing=packing,
        **wanted,
    )
    output.last_hidden_state = output.last_hidden_state.view(rows, length, -1)
    return output


def no_mask(input_ids: Tensor) -> Tensor:
    """A mask of four dimensions, which transformers passes on instead of making one."""
    return torch.zeros(1, 1, 1, 1, device=input_ids.device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment of a row.

    Args:
        module: the layer's attention.
        query: [1, heads, S, size].
        key, value: the same of perhaps fewer heads.
        attention_mask: ignored; `packing` determines it.
        packing: the segments of the S tokens.
        dropout: must be 0.
        scaling: of the scores; None: 1 / sqrt(size).
        sliding_window: how many keys a query sees at most, its own included.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: [heads], sinks: scores of an additional key, whose value is 0.

    Returns:
        The outputs, [1, S, heads, size].
    """
    assert not dropout, "a model is loaded without dropout"
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None and _takes_varlen(query, value):
        attended = varlen_attn(
            query[0].transpose(0, 1),
            _tokens(key, packing.keys),
            _tokens(value, packing.keys),
            packing.query_starts,
            packing.key_starts,
            packing.longest_query,
            packing.longest_key,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[None], None
    return _attend_blocks(query, key, value, packing, scaling, sliding_window, softcap, s_aux)[None], None


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`packed_attention` by SDPA over padded blocks, or by `_explicit_attention`; [S, heads, size]."""
    grouped = query.shape[1] // key.shape[1]
    # Except on a CPU, SDPA's memory-efficient kernels need as many key heads as query heads.
    if grouped > 1 and (query.device.type != "cpu" or softcap or sinks is not None):
        key, value = key.repeat_interleave(grouped, dim=1), value.repeat_interleave(grouped, dim=1)
        grouped = 1
    blocks, places = packing.blocks
    outputs = []
    for block in blocks:
        states = _block(query, block.queries), _block(key, block.keys), _block(value, block.keys)
        mask = block.mask(sliding_window)
        if softcap or sinks is not None:
            attended = _explicit_attention(*states, mask, scaling, softcap, sinks)
        else:
            attended = scaled_dot_product_attention(
                *states, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped > 1
            )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places)


def _takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length kernel, flash attention, supports these heads."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in _FUSED
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """SDPA with a cap of the scores and sinks [heads]; query, key and value [m, heads, l, size], equal in heads."""
    scores = (query @ key.transpose(-1, -2) * scaling).to(torch.promote_types(query.dtype, torch.float32))
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def _block(states: Tensor, places: Tensor) -> Tensor:
    """From [1, heads, S, size] and int64 [m, l] to [m, heads, l, size]."""
    return _tokens(states, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _tokens(states: Tensor, places: Tensor) -> Tensor:
    """From [1, heads, S, size] and int64 [n] to [n, heads, size].

    Gathered in float32 if there is a gradient: a prompt's is the sum over its completions.
    """
    tokens = states[0].transpose(0, 1)
    if tokens.dtype in _FUSED and tokens.requires_grad:
        return tokens.float().index_select(0, places).to(tokens.dtype)
    return tokens.index_select(0, places)
