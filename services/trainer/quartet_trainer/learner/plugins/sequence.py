"""Sequence parallelism: between the matrix products, each rank of a group has its part of every sequence.

ColossalAI splits the sequence after the embedding and puts it together after the last norm, and its sharded linear
layers ("split_gather", "ring": all-gather before, reduce-scatter after) or an exchange of positions for heads around
the attention ("all_to_all", arXiv:2309.14509) do the rest. Two of its parts are replaced here: its attention, which
rounds to float32, has no causal mask under a pipeline, and makes all of a sequence's weights at once; and, without a
pipeline, its model's forward, which makes a mask as large. Attention is torch's, causal, over the whole sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer._operation import (
    all_to_all_comm,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from colossalai.shardformer.policies import qwen2
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

qwen2.print = lambda *_: None  # it would print a setting of its own for each model with sequence parallelism


class SequenceParallel:
    """How one group of ranks shares sequences. Padding a sequence on the right changes nothing before it."""

    def __init__(self, mode: str, group: dist.ProcessGroup) -> None:
        """Take the mode, "split_gather", "ring" or "all_to_all", and the ranks that share each sequence.

        In the first two these are the tensor-parallel ranks. In the third each has a gradient of its own part, and the
        exchange among data-parallel ranks averages over them too: the gradient is multiplied by their number.
        """
        self._group = group
        self._size = dist.get_world_size(group)
        self._exchanges = mode == "all_to_all"

    def pad(self, input_ids: Tensor) -> Tensor:
        """[M, L] to [M, L'] with the next L' that the ranks divide."""
        return nn.functional.pad(input_ids, (0, -input_ids.shape[1] % self._size))

    def split(self, hidden: Tensor) -> Tensor:
        """This rank's part [M, L / ranks, H] of what all have, [M, L, H]."""
        return split_forward_gather_backward(hidden, 1, self._group, 1 / self._size if self._exchanges else None)

    def join(self, hidden: Tensor) -> Tensor:
        """[M, L, H] on all ranks, from their parts. What follows must be the same on all of them."""
        return gather_forward_split_backward(hidden, 1, self._group, self._size if self._exchanges else None)

    def last(self, hidden: Tensor) -> Tensor:
        """What ColossalAI's last stage ends in, joined: with "all_to_all" it leaves that to us."""
        return self.join(hidden) if self._exchanges else hidden

    def spread(self, causal_lm: PreTrainedModel, *, staged: bool) -> None:
        """Have a sharded model, whole or one stage of a pipeline, share the sequences that it gets, each padded."""
        base = causal_lm.base_model
        for layer in base.layers:
            if layer is not None:  # another stage's
                layer.self_attn.forward = partial(self._attention, layer.self_attn)
        if not staged:
            base.forward = partial(self._base_forward, base)

    def _base_forward(self, base: nn.Module, input_ids: Tensor, use_cache: bool = False) -> BaseModelOutputWithPast:
        embedded = base.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        rotations = base.rotary_emb(embedded, positions)
        hidden = self.split(embedded)
        for layer in base.layers:
            given = (hidden, None, positions, None, False, False, None, rotations)
            if base.gradient_checkpointing and base.training:
                hidden = base._gradient_checkpointing_func(layer.__call__, *given)[0]
            else:
                hidden = layer(*given)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.join(base.norm(hidden)))

    def _attention(
        self, layer: nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """Of this rank's heads over the whole sequence; takes and gives its part of the sequence."""
        rows = hidden_states.shape[0]
        query, key, value = (
            self._heads(project(hidden_states), rows, layer.head_dim)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        if not self._exchanges:
            return layer.o_proj(attended.transpose(1, 2).flatten(2)), None
        # Positions outermost: [L, M, heads * width] of these heads to [L / ranks, M, ...] of all.
        positions = attended.permute(2, 0, 1, 3).flatten(2)
        mine = all_to_all_comm(positions.flatten(0, 1)[None], self._group, scatter_dim=1, gather_dim=2)
        return layer.o_proj(mine.view(-1, rows, mine.shape[-1]).transpose(0, 1)), None

    def _heads(self, projected: Tensor, rows: int, width: int) -> Tensor:
        """[M, heads, L, width] over the whole sequence, of what this rank's linear layer gave."""
        if self._exchanges:
            # [L / ranks, M, ...] of all heads to [L, M, ...] of this rank's: one sequence of L * M, for over many
            # sequences ColossalAI would use a call that Gloo has not.
            mine = projected.transpose(0, 1).flatten(0, 1)[None]
            return (
                all_to_all_comm(mine, self._group)
                .view(-1, rows, projected.shape[-1] // self._size // width, width)
                .permute(1, 2, 0, 3)
            )
        return projected.unflatten(2, (-1, width)).transpose(1, 2)
