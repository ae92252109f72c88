"""Sequence parallelism: each rank of a group computes a part of every sequence, except in the attention.

There, positions are exchanged for heads and back (Ulysses, arXiv:2309.14509) by a function of transformers'
`AttentionInterface`. Between the exchanges a rank computes torch's causal attention of its heads over whole sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer._operation import all_to_all_comm, gather_forward_split_backward
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quartet_trainer.learner.attention import no_mask

_NAME = "quartet_sequence_parallel"


class SequenceParallel:
    """How one group of ranks shares sequences. They are padded on the right, which changes nothing before it.

    Each rank has the gradient of its own part. The data-parallel reduction averages over these ranks too, so
    `join`'s backward multiplies the gradient by their number.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group`: the ranks that share each sequence."""
        self._group = group
        self._size = dist.get_world_size(group)

    def use(self, causal_lm: PreTrainedModel) -> None:
        """Make a model use this attention."""
        AttentionInterface.register(_NAME, sequence_parallel_attention)
        causal_lm.config._attn_implementation = _NAME

    def part(self, input_ids: Tensor) -> dict[str, Any]:
        """The base model's arguments on this rank: its part of [M, L], padded to a multiple of the ranks."""
        padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % self._size))
        mine = padded.chunk(self._size, dim=1)[dist.get_rank(self._group)]
        positions = torch.arange(padded.shape[1], device=padded.device).chunk(self._size)[dist.get_rank(self._group)]
        return {
            "input_ids": mine,
            # Padding repeats the last position: rotary frequencies may depend on the largest.
            "position_ids": positions.clamp(max=input_ids.shape[1] - 1)[None],
            "attention_mask": no_mask(mine),
            "sequence_parallel": self,
        }

    def join(self, hidden: Tensor) -> Tensor:
        """Gather [M, L, H] on all ranks from their parts. All must compute the same from it."""
        return gather_forward_split_backward(hidden, 1, self._group, self._size)

    def heads(self, states: Tensor) -> Tensor:
        """From [M, heads, L / ranks, size], of all heads, to [M, heads / ranks, L, size]."""
        rows, heads, _, size = states.shape
        # As one sequence of L * M: for several, ColossalAI would use a collective that Gloo does not have.
        mine = states.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)[None]
        return all_to_all_comm(mine, self._group).view(-1, rows, heads // self._size, size).permute(1, 2, 0, 3)

    def positions(self, attended: Tensor) -> Tensor:
        """From [M, heads / ranks, L, size] to [M, L / ranks, heads, size]."""
        rows, heads, _, size = attended.shape
        whole = attended.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)[None]
        mine = all_to_all_comm(whole, self._group, scatter_dim=1, gather_dim=2)
        return mine.view(-1, rows, heads * self._size, size).transpose(0, 1)


def sequence_parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_parallel: SequenceParallel,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole sequences, of which each rank has a part; see `SequenceParallel`.

    Args:
        module: the layer's attention.
        query, key, value: [M, heads, L / ranks, size]; keys and values may have fewer heads.
        attention_mask: ignored: rows are padded on the right only.
        sequence_parallel: the ranks that share the sequences.
        dropout: of the attention's weights.
        scaling: of its scores.

    Returns:
        The outputs, [M, L / ranks, heads, size].
    """
    query, key, value = (sequence_parallel.heads(states) for states in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return sequence_parallel.positions(attended), None
