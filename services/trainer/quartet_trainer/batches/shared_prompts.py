"""A micro-batch whose completions share their group's prompt: it stands there, and is computed, once for all of them.

Of what a model computes only attention looks at other tokens. So everything else runs over the tokens as they are, one
after another without padding; for attention the keys and values of a prompt are gathered for each of its completions.
So are its queries where prompts are short, as attention that is causal throughout is fastest. Where they are long, they
attend once and among themselves, and completions to both, which takes a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.batches.dealing import cut_alike
from quartet_trainer.batches.experience import ExperienceBatch

MOST_MASKED = 2**24
"""Elements of a mask: 64 MiB in float32."""


@dataclass(frozen=True)
class Part:
    """The attention of m sequences of like length, by their tokens' places in [0, S), padded on the right with 0."""

    queries: Tensor
    """int64 [m, q]."""
    keys: Tensor
    """int64 [m, k]: `queries` where there is no mask."""
    mask: Tensor | None = None
    """bool [m, 1, q, k]: the keys that a query sees; None: itself and those before it."""

    def to(self, device: torch.device) -> Part:
        """The same on `device`."""
        queries = self.queries.to(device, non_blocking=True)
        if self.mask is None:
            return Part(queries, queries)
        return Part(queries, self.keys.to(device, non_blocking=True), self.mask.to(device, non_blocking=True))


@dataclass(frozen=True)
class SharedPrompts:
    """How S tokens, first the prompts, then the completions, make M sequences of a prompt and a completion each."""

    positions: Tensor
    """int64 [1, S]: each token's place in its sequence."""
    parts: tuple[Part, ...]
    places: Tensor
    """int64 [S]: where a token is among the queries of all parts, flat and one after another; of several the first."""

    def to(self, device: torch.device) -> SharedPrompts:
        """The same on `device`."""
        return SharedPrompts(
            self.positions.to(device, non_blocking=True),
            tuple(part.to(device) for part in self.parts),
            self.places.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class SharedRow:
    """The tokens of M completions and their prompts, and where they are."""

    input_ids: Tensor
    """int64 [1, S]."""
    prompt_ends: Tensor
    """int64 [M]: the place of the last token of a completion's prompt."""
    completion_starts: Tensor
    """int64 [M]: the place of its first token."""
    prompts: SharedPrompts


@dataclass(frozen=True)
class _Laid:
    """Groups and sequences by the places of their tokens; all int64."""

    prompt_starts: Tensor  # [groups]
    prompt_lengths: Tensor  # [groups]
    group: Tensor  # [M]
    completion_starts: Tensor  # [M]
    completion_lengths: Tensor  # [M]

    @property
    def prompts_of_rows(self) -> Tensor:
        return self.prompt_lengths[self.group]


def share_prompts(batch: ExperienceBatch, chosen: Tensor, max_padding: float) -> SharedRow:
    """Lay out the completions `chosen` (int64 [M]), those of a group one after another.

    Args:
        batch: the groups of the step.
        chosen: completions.
        max_padding: share of padding above which sequences of a part are too unlike.
    """
    _, group, sizes = torch.unique_consecutive(batch.groups[chosen], return_inverse=True, return_counts=True)
    first = chosen[sizes.cumsum(0) - sizes]
    prompt_lengths, completion_lengths = batch.prompt_lengths[first], batch.completion_lengths[chosen]
    laid = _Laid(
        prompt_starts=_starts(prompt_lengths),
        prompt_lengths=prompt_lengths,
        group=group,
        completion_starts=prompt_lengths.sum() + _starts(completion_lengths),
        completion_lengths=completion_lengths,
    )
    of_prompt, prompt_offset = _runs(prompt_lengths)
    of_row, offset = _runs(completion_lengths)
    before = batch.tokens.numel() - batch.rows.numel()
    source = torch.cat(
        [
            batch.prompt_starts[first][of_prompt] + prompt_offset,
            before + batch.completion_starts[chosen][of_row] + offset,
        ]
    )
    parts = _cheapest(_whole(laid, max_padding), laid, max_padding)
    queries = torch.cat([part.queries[held] for part, held in parts])
    flat = torch.cat([held.flatten() for _, held in parts]).nonzero()[:, 0]
    places = torch.empty_like(source)
    places[queries] = flat
    return SharedRow(
        input_ids=batch.tokens[source].long()[None],
        prompt_ends=(laid.prompt_starts + prompt_lengths - 1)[group],
        completion_starts=laid.completion_starts,
        prompts=SharedPrompts(
            positions=torch.cat([prompt_offset, laid.prompts_of_rows[of_row] + offset])[None],
            parts=tuple(part for part, _ in parts),
            places=places,
        ),
    )


_Held = tuple[Part, Tensor]
"""A part, and bool [m, q]: the queries whose outputs count. Each token is one of them once."""


def _cheapest(whole: list[_Held], laid: _Laid, max_padding: float) -> list[_Held]:
    """Whole sequences, or prompts and completions apart: whichever multiplies fewer queries with keys."""
    scores = sum(part.queries.numel() * part.queries.shape[1] / 2 for part, _ in whole)
    apart = sum(length**2 / 2 for length in laid.prompt_lengths.tolist())
    cuts = [cut for cut in _alike(laid.completion_lengths, max_padding) if laid.completion_lengths[cut[0]]]
    masks = [_elements(laid, cut) for cut in cuts]
    if apart + sum(masks) >= scores or max(masks, default=0) > MOST_MASKED:
        return whole
    return [*_prompts(laid, max_padding), *(_completions(laid, cut) for cut in cuts)]


def _whole(laid: _Laid, max_padding: float) -> list[_Held]:
    """Sequences from the first token of their prompts on; a prompt's outputs are those of its first completion."""
    first = torch.ones_like(laid.group, dtype=torch.bool)
    first[1:] = laid.group[1:] != laid.group[:-1]
    prompts = laid.prompts_of_rows
    parts = []
    for cut in _alike(prompts + laid.completion_lengths, max_padding):
        offset = torch.arange(int((prompts + laid.completion_lengths)[cut[0]]))
        answered = offset - prompts[cut, None]
        places = torch.where(
            answered < 0,
            laid.prompt_starts[laid.group[cut], None] + offset,
            laid.completion_starts[cut, None] + answered,
        )
        real = answered < laid.completion_lengths[cut, None]
        places = torch.where(real, places, 0)
        parts.append((Part(places, places), real & (first[cut, None] | (answered >= 0))))
    return parts


def _prompts(laid: _Laid, max_padding: float) -> list[_Held]:
    """Prompts, each by itself."""
    parts = []
    for cut in _alike(laid.prompt_lengths, max_padding):
        places, real = _padded(laid.prompt_starts[cut], laid.prompt_lengths[cut])
        parts.append((Part(places, places), real))
    return parts


def _completions(laid: _Laid, cut: Tensor) -> _Held:
    """Completions that see their prompts and themselves."""
    group = laid.group[cut]
    prompts, seen = _padded(laid.prompt_starts[group], laid.prompt_lengths[group])
    answers, real = _padded(laid.completion_starts[cut], laid.completion_lengths[cut])
    m, q = answers.shape
    causal = torch.ones(q, q, dtype=torch.bool).tril()
    mask = torch.cat([seen[:, None].expand(m, q, -1), causal.expand(m, q, q)], dim=-1)
    return Part(answers, torch.cat([prompts, answers], dim=-1), mask[:, None]), real


def _elements(laid: _Laid, cut: Tensor) -> int:
    """Of the mask of `_completions`."""
    queries = int(laid.completion_lengths[cut[0]])
    return len(cut) * queries * (int(laid.prompts_of_rows[cut].max()) + queries)


def _alike(lengths: Tensor, max_padding: float) -> list[Tensor]:
    """Cut by length, the longest first."""
    longest_first = np.argsort(-lengths.numpy(), kind="stable")
    return [torch.from_numpy(part) for part in cut_alike(longest_first, lengths.numpy(), max_padding)]


def _padded(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of places as rows padded with 0, [n, longest], and where they are no padding."""
    offset = torch.arange(int(lengths.max()))
    real = offset < lengths[:, None]
    return torch.where(real, starts[:, None] + offset, 0), real


def _starts(lengths: Tensor) -> Tensor:
    """Where runs of these lengths begin, one after another."""
    return lengths.cumsum(0) - lengths


def _runs(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of these lengths, one after another: of each element, its run and its place in it."""
    run = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return run, torch.arange(run.numel()) - _starts(lengths)[run]
