"""A micro-batch whose completions share their group's prompt: it stands there, and is computed, once for all of them.

Of what a model computes only attention looks at other tokens. So everything else runs over the tokens as they are, one
after another without padding; for attention each completion's tokens are put together behind its prompt's, whose
queries, keys and values are gathered as often as there are completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batches.dealing import cut_alike
from quartet_trainer.batches.experience import ExperienceBatch


@dataclass(frozen=True)
class SharedPrompts:
    """How S tokens, first the prompts, then the completions, make M sequences of a prompt and a completion each."""

    positions: Tensor
    """int64 [1, S]: each token's place in its sequence."""
    parts: tuple[Tensor, ...]
    """int64 [m, l] each: sequences of like length by their tokens' places in [0, S), padded on the right with 0."""
    places: Tensor
    """int64 [S]: where a token is in all parts, flat and one after another; a prompt's in its first completion's."""

    def to(self, device: torch.device) -> SharedPrompts:
        """The same on `device`."""
        return SharedPrompts(
            self.positions.to(device, non_blocking=True),
            tuple(part.to(device, non_blocking=True) for part in self.parts),
            self.places.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Shared:
    """The tokens of M completions, and where they are."""

    input_ids: Tensor
    """int64 [1, S]."""
    prompt_ends: Tensor
    """int64 [M]: the place of the last token of a completion's prompt."""
    completion_starts: Tensor
    """int64 [M]: the place of its first token."""
    prompts: SharedPrompts


def share_prompts(batch: ExperienceBatch, chosen: Tensor, max_padding: float) -> Shared:
    """Lay out the completions `chosen` (int64 [M]), those of a group one after another.

    Args:
        batch: the groups of the step.
        chosen: completions.
        max_padding: share of padding above which sequences of a part are too unlike.
    """
    _, group = torch.unique_consecutive(batch.groups[chosen], return_inverse=True)
    rows = torch.arange(chosen.numel())
    first_row = torch.ones(rows.numel(), dtype=torch.bool)
    first_row[1:] = group[1:] != group[:-1]
    first_of_group = rows[first_row]
    prompt_lengths, completion_lengths = batch.prompt_lengths[chosen], batch.completion_lengths[chosen]

    of_groups = prompt_lengths[first_of_group]
    prompt_starts = (of_groups.cumsum(0) - of_groups)[group]
    completion_starts = of_groups.sum() + completion_lengths.cumsum(0) - completion_lengths

    in_prompts, prompt_offset = _runs(of_groups)
    in_completions, completion_offset = _runs(completion_lengths)
    first = first_of_group[in_prompts]
    before = batch.tokens.numel() - batch.rows.numel()
    source = torch.cat(
        [
            batch.prompt_starts[chosen][first] + prompt_offset,
            before + batch.completion_starts[chosen][in_completions] + completion_offset,
        ]
    )
    row = torch.cat([first, in_completions])
    positions = torch.cat([prompt_offset, prompt_lengths[in_completions] + completion_offset])

    lengths = prompt_lengths + completion_lengths
    longest_first = np.argsort(-lengths.numpy(), kind="stable")
    parts, begins, begun = [], torch.empty_like(rows), 0
    for part in map(torch.from_numpy, cut_alike(longest_first, lengths.numpy(), max_padding)):
        width = int(lengths[part[0]])
        offset = torch.arange(width)
        in_completion = offset - prompt_lengths[part, None]
        sequence = torch.where(
            in_completion < 0, prompt_starts[part, None] + offset, completion_starts[part, None] + in_completion
        )
        parts.append(torch.where(offset < lengths[part, None], sequence, 0))
        begins[part] = begun + torch.arange(part.numel()) * width
        begun += part.numel() * width
    return Shared(
        input_ids=batch.tokens[source].long()[None],
        prompt_ends=prompt_starts + prompt_lengths - 1,
        completion_starts=completion_starts,
        prompts=SharedPrompts(positions[None], tuple(parts), begins[row] + positions),
    )


def _runs(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of these lengths, one after another: of each element, its run and its place in it."""
    run = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return run, torch.arange(run.numel()) - (lengths.cumsum(0) - lengths)[run]
