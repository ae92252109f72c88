"""Decodes the groups of a step from messages into flat tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quartet.v1 import experience_pb2, tensor_pb2
from torch import Tensor

from quartet_common.model_folder import at_most
from quartet_common.sampling import unreplayable
from quartet_trainer.algorithms.turns import Turns
from quartet_trainer.batch.layout import Layout, decode_layout, decode_turns, join_turns
from quartet_trainer.batch.tensors import (
    ExperienceError,
    all_rows,
    must_be_finite,
    one_dimension,
    rows,
    view,
)
from quartet_trainer.learner_settings import LOWEST_TEMPERATURE
from quartet_weights.routed_experts import Routing


@dataclass(frozen=True)
class Candidates:
    """The candidates that each of T completion tokens was sampled from, after top_p, top_k and min_p."""

    counts: Tensor
    """int64 [T]; 0: all of the vocabulary."""
    starts: Tensor
    """int64 [T]: index into `token_ids` of a token's first candidate."""
    token_ids: Tensor
    """int32 [sum of counts]."""

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [t] and ids [sum of counts], both int64, for the completion tokens at these indices [t]."""
        counts, starts = self.counts[tokens], self.starts[tokens]
        shift = starts - (counts.cumsum(0) - counts)
        places = torch.repeat_interleave(shift, counts) + torch.arange(int(counts.sum()))
        return counts, self.token_ids[places].long()


def decode_candidates(
    group: experience_pb2.GroupTensors,
    completions: np.ndarray,
    lengths: np.ndarray,
    loss_mask: np.ndarray,
    vocabulary_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode a group's candidates: the count of each completion token and all ids, int32. Raises ExperienceError."""
    if not group.HasField("sampling_mask_counts"):
        raise ExperienceError("sampling_mask_counts is missing; with run.sampling_masks = true every group has it")
    counts = all_rows(group.sampling_mask_counts, tensor_pb2.DTYPE_INT32, lengths, "sampling_mask_counts")
    if (counts < 0).any() or (counts > vocabulary_size).any():
        raise ExperienceError(
            f"sampling_mask_counts has {counts.min()} to {counts.max()}; allowed: 0 to {vocabulary_size}"
        )
    row_of = np.repeat(np.arange(lengths.size), lengths)
    per_row = np.bincount(row_of, weights=counts, minlength=lengths.size).astype(np.int64)
    ids, given = rows(group.sampling_mask_token_ids, tensor_pb2.DTYPE_INT32, "sampling_mask_token_ids")
    if not np.array_equal(given, per_row):
        raise ExperienceError(
            f"sampling_mask_token_ids has {ids.size} ids; sampling_mask_counts says {per_row.tolist()}"
        )
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary_size):
        raise ExperienceError(
            f"sampling_mask_token_ids has ids from {ids.min()} to {ids.max()}; this model's are 0 to "
            f"{vocabulary_size - 1}"
        )
    cut = np.flatnonzero(counts)
    if cut.size:
        drawn = np.repeat(completions[cut], counts[cut]) == ids
        among = np.logical_or.reduceat(drawn, np.cumsum(counts[cut]) - counts[cut])
        lost = cut[~among & (loss_mask[cut] != 0)]
        if lost.size:
            raise ExperienceError(
                f"sampling_mask_token_ids lacks the token itself at {lost.size} places, the first at {lost[0]}"
            )
    return counts, ids


def decode_routed_experts(
    group: experience_pb2.GroupTensors, layout: Layout, lengths: np.ndarray, routing: Routing
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the experts of the prompts' and of all completions' tokens, each [tokens, layers, chosen]. A completion's
    last token gets those of the previous token. Raises ExperienceError."""
    prompt_tokens = int(layout.prompt_lengths.sum())
    if not group.HasField("prompt_routed_experts"):
        raise ExperienceError("prompt_routed_experts is missing; with run.router_replay = true every group has it")
    message, shape = group.prompt_routed_experts, (routing.hidden_layers, routing.chosen)
    dtype = tensor_pb2.DTYPE_UINT8 if routing.experts <= 256 else tensor_pb2.DTYPE_INT32
    prompt = view(message.dtype, message.data, dtype, "prompt_routed_experts")
    if list(message.shape) != [prompt_tokens, *shape] or prompt.size != math.prod(message.shape):
        raise ExperienceError(
            f"prompt_routed_experts has shape {list(message.shape)} and {prompt.size} elements; this model's of a "
            f"prompt of {prompt_tokens} tokens has {[prompt_tokens, *shape]}"
        )
    given, sizes = rows(group.completion_routed_experts, dtype, "completion_routed_experts")
    computed = np.maximum(lengths - 1, 0)
    if not np.array_equal(sizes, computed * math.prod(shape)):
        raise ExperienceError(
            f"completion_routed_experts has rows of {sizes.tolist()[:8]} elements; each has {math.prod(shape)} for "
            "every token of the completion but the last"
        )
    for name, experts in (("prompt_routed_experts", prompt), ("completion_routed_experts", given)):
        if experts.size and not (experts.min() >= 0 and experts.max() < routing.experts):
            raise ExperienceError(
                f"{name} has experts from {experts.min()} to {experts.max()}; this model's are 0 to "
                f"{routing.experts - 1}"
            )
    prompt, given = prompt.reshape(-1, *shape), given.reshape(-1, *shape)
    row = np.repeat(np.arange(lengths.size), lengths)
    offset = np.arange(row.size) - (np.cumsum(lengths) - lengths)[row]
    after = prompt.shape[0] + (np.cumsum(computed) - computed)[row] + np.minimum(offset, computed[row] - 1)
    last_of_prompt = (np.cumsum(layout.prompt_lengths) - 1)[layout.row_prompts]
    return prompt, np.concatenate([prompt, given])[np.where(lengths[row] > 1, after, last_of_prompt[row])]


@dataclass(frozen=True)
class ExperienceBatch:
    """N rows of C completions of B groups, T completion tokens in all, on the CPU, without padding.

    A row is what one forward pass reads: a prompt and what followed. A completion is one row, or an agent's several.
    """

    tokens: Tensor
    """int32: all prompts, each once for its group, then the T completion tokens."""
    prompts: Tensor
    """int64 [N]: the prompt of each row, counted over the batch; rows of one prompt have one group."""
    prompt_starts: Tensor
    """int64 [N]: index into `tokens` of the row's prompt."""
    prompt_lengths: Tensor
    """int64 [N], each >= 1."""
    completion_starts: Tensor
    """int64 [N]: index of the row's first among the T completion tokens."""
    completion_lengths: Tensor
    """int64 [N], each >= 0."""
    rows: Tensor
    """int64 [T]: the row of each completion token, not decreasing."""
    completions: Tensor
    """int64 [N]: the completion of each row, not decreasing."""
    groups: Tensor
    """int64 [C]: the group of each completion."""
    compared: Tensor
    """int64 [C]: those with the same number, of one group and seat, are compared with one another."""
    rollout_log_probs: Tensor
    """float32 [T]: under the distribution that the token was sampled from."""
    loss_mask: Tensor
    """bool [T]: true where the policy generated the token."""
    turns: Turns
    """The turns of the policy."""
    rewards: Tensor
    """float32 [C]."""
    temperatures: Tensor
    """float32 [N], each > 0."""
    truncated: Tensor
    """bool [N]: the row ended at its length limit."""
    format_acc: Tensor
    """float32 [C]."""
    ans_acc: Tensor
    """float32 [C]; 0 where the answer was not judged."""
    ans_judged: Tensor
    """bool [C]: a verifier judged whether the answer is right."""
    candidates: Candidates | None = None
    """With sampling masks."""
    routed_experts: Tensor | None = None
    """With router replay: uint8 or int32 [tokens, hidden layers, experts of a token], in the order of `tokens`. A
    row's last token, for which the engine ran no forward pass, has those of the previous token."""
    teacher_log_probs: Tensor | None = None
    """With [run.teachers]: float32 [T], at temperature 1."""

    @property
    def completion_tokens(self) -> Tensor:
        """int32 [T]: the part of `tokens` after the prompts."""
        return self.tokens[self.tokens.numel() - self.rows.numel() :]

    @property
    def completion_of_token(self) -> Tensor:
        """int64 [T], not decreasing."""
        return self.completions[self.rows]


def decode_groups(
    groups: Sequence[experience_pb2.GroupTensors],
    vocabulary_size: int,
    *,
    sampling_masks: bool = False,
    routing: Routing | None = None,
    longest: int | None = None,
    teachers: bool = False,
) -> ExperienceBatch:
    """Decode groups into one batch. The messages' bytes are copied once, when they are concatenated.

    Args:
        groups: at least one.
        vocabulary_size: token ids must be below it.
        sampling_masks: whether each group must have sampling masks; otherwise they are ignored.
        routing: the model's, if each group must have routed experts; otherwise they are ignored.
        longest: the model's `quartet_common.model_folder.fixed_rope_length`.
        teachers: whether each group must have a teacher's log-probs; otherwise they are ignored.

    Raises:
        ExperienceError: a field is missing, of another dtype or length, or has a value that cannot be trained on.
    """
    if not groups:
        raise ExperienceError("the batch has no group; a step trains at least one")
    parts = []
    try:
        for group in groups:
            parts.append(
                decode_group(
                    group,
                    vocabulary_size,
                    sampling_masks=sampling_masks,
                    routing=routing,
                    longest=longest,
                    teachers=teachers,
                )
            )
    except ExperienceError as error:
        raise ExperienceError(f"group {len(parts)}: {error}") from error
    layouts = [part.layout for part in parts]
    prompt_lengths = np.concatenate([layout.prompt_lengths for layout in layouts])
    lengths = np.concatenate([part.arrays["lengths"] for part in parts])

    def join(*names: str) -> Tensor:
        return torch.from_numpy(np.concatenate([part.arrays[name] for name in names for part in parts]))

    candidates = None
    if sampling_masks:
        counts = join("mask_counts").long()
        candidates = Candidates(counts=counts, starts=counts.cumsum(0) - counts, token_ids=join("mask_ids"))
    sizes = [layout.seats.size for layout in layouts]
    prompts = _count_on([one.row_prompts for one in layouts], [one.prompt_lengths.size for one in layouts])
    completions = _count_on([one.row_completions for one in layouts], sizes)
    compared = _count_on([one.seats for one in layouts], [int(one.seats.max()) + 1 for one in layouts])
    return ExperienceBatch(
        tokens=join("prompts", "completions"),
        prompts=torch.from_numpy(prompts),
        prompt_starts=torch.from_numpy((np.cumsum(prompt_lengths) - prompt_lengths)[prompts]),
        prompt_lengths=torch.from_numpy(prompt_lengths[prompts]),
        completion_starts=torch.from_numpy(np.cumsum(lengths) - lengths),
        completion_lengths=torch.from_numpy(lengths),
        rows=torch.from_numpy(np.repeat(np.arange(lengths.size), lengths)),
        completions=torch.from_numpy(completions),
        groups=torch.from_numpy(np.repeat(np.arange(len(parts)), sizes)),
        compared=torch.from_numpy(compared),
        rollout_log_probs=join("log_probs"),
        loss_mask=join("loss_mask").bool(),
        turns=join_turns([part.turns for part in parts]),
        rewards=join("rewards"),
        temperatures=join("temperatures"),
        truncated=join("truncated").bool(),
        format_acc=join("format_acc"),
        ans_acc=join("ans_acc"),
        ans_judged=join("ans_judged").bool(),
        candidates=candidates,
        routed_experts=None if routing is None else join("prompt_experts", "completion_experts"),
        teacher_log_probs=join("teacher_log_probs") if teachers else None,
    )


def _count_on(parts: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Concatenate indices that count from 0 in each part, so that they count on from part to part."""
    return np.concatenate([part + start for part, start in zip(parts, np.cumsum([0, *counts])[:-1], strict=True)])


@dataclass(frozen=True)
class DecodedGroup:
    """One group."""

    layout: Layout
    turns: Turns
    arrays: dict[str, np.ndarray]
    """The other fields by name, views of the message's bytes."""


def decode_group(
    group: experience_pb2.GroupTensors,
    vocabulary_size: int,
    *,
    sampling_masks: bool = False,
    routing: Routing | None = None,
    longest: int | None = None,
    teachers: bool = False,
) -> DecodedGroup:
    """Decode one group. Arguments and errors: see `decode_groups`."""
    layout, prompts, completions, lengths = _decode_tokens(group, vocabulary_size, longest)
    if group.HasField("loss_mask") and group.loss_mask.lengths:
        loss_mask = all_rows(group.loss_mask, tensor_pb2.DTYPE_UINT8, lengths, "loss_mask")
    else:
        loss_mask = np.ones(completions.size, dtype=np.uint8)
    _, spans = rows(group.version_spans, tensor_pb2.DTYPE_INT64, "version_spans")
    if spans.size != lengths.size or (spans % 3).any():
        raise ExperienceError(
            f"version_spans has rows of {spans.tolist()[:8]}; each completion has one row, of triples"
        )

    def values(field: str, size: int, of: str, dtype: int = tensor_pb2.DTYPE_FLOAT32) -> np.ndarray:
        array = one_dimension(getattr(group, field), dtype, field)
        if array.size != size:
            raise ExperienceError(f"{field} has {array.size} values for {size} {of}")
        must_be_finite(array, field)
        return array

    def per_row(field: str, dtype: int = tensor_pb2.DTYPE_FLOAT32) -> np.ndarray:
        return values(field, lengths.size, "rows" if group.HasField("prompts") else "completions", dtype)

    def per_completion(field: str, dtype: int = tensor_pb2.DTYPE_FLOAT32) -> np.ndarray:
        return values(field, layout.seats.size, "completions", dtype)

    log_probs = all_rows(group.rollout_log_probs, tensor_pb2.DTYPE_FLOAT32, lengths, "rollout_log_probs")
    must_be_finite(log_probs, "rollout_log_probs")
    temperatures = per_row("temperatures")
    if temperatures.min() < LOWEST_TEMPERATURE:
        raise ExperienceError(
            f"temperatures has {temperatures.min():g}; only completions sampled at {LOWEST_TEMPERATURE:g} or above can "
            "be trained on"
        )
    if (wrong := unreplayable(group.sampling)) is not None:
        name, value = wrong
        raise ExperienceError(
            f"its completions were drawn with {name} = {value}: their log-probs are not the model's and cannot be "
            "computed again"
        )
    arrays = {
        "prompts": prompts,
        "completions": completions,
        "lengths": lengths,
        "log_probs": log_probs,
        "loss_mask": loss_mask,
        "temperatures": temperatures,
        **{name: per_completion(name) for name in ("rewards", "format_acc", "ans_acc")},
        "truncated": per_row("truncated", tensor_pb2.DTYPE_UINT8),
        "ans_judged": np.ones(layout.seats.size, dtype=np.uint8),
    }
    if group.HasField("ans_judged"):
        arrays["ans_judged"] = per_completion("ans_judged", tensor_pb2.DTYPE_UINT8)
    outcomes = per_completion("outcome_rewards") if group.HasField("outcome_rewards") else arrays["rewards"]
    turns = decode_turns(group, layout, completions, lengths, loss_mask, outcomes)
    if sampling_masks:
        masks = decode_candidates(group, completions, lengths, loss_mask, vocabulary_size)
        arrays["mask_counts"], arrays["mask_ids"] = masks
    if routing is not None:
        experts = decode_routed_experts(group, layout, lengths, routing)
        arrays["prompt_experts"], arrays["completion_experts"] = experts
    if teachers:
        if not group.HasField("teacher_log_probs"):
            raise ExperienceError(
                "teacher_log_probs is missing; with [run.teachers] every group has it: a rollout of an earlier release "
                "stores none"
            )
        judged = all_rows(group.teacher_log_probs, tensor_pb2.DTYPE_FLOAT32, lengths, "teacher_log_probs")
        must_be_finite(judged, "teacher_log_probs")
        arrays["teacher_log_probs"] = judged
    return DecodedGroup(layout, turns, arrays)


def _decode_tokens(
    group: experience_pb2.GroupTensors, vocabulary_size: int, longest: int | None
) -> tuple[Layout, np.ndarray, np.ndarray, np.ndarray]:
    """Decode the layout, all prompts' ids, all completions' ids and the rows' lengths."""
    completions, lengths = rows(group.completion_token_ids, tensor_pb2.DTYPE_INT32, "completion_token_ids")
    if lengths.size == 0:
        raise ExperienceError("completion_token_ids has no row; a group has at least one completion")
    layout, prompts = decode_layout(group, lengths.size)
    tokens = int((layout.prompt_lengths[layout.row_prompts] + lengths).max())
    if longest is not None and tokens > longest:
        raise ExperienceError(f"a completion has {tokens} tokens with its prompt; allowed: {at_most(longest)}")
    for name, ids in ((layout.prompts_field, prompts), ("completion_token_ids", completions)):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary_size):
            raise ExperienceError(
                f"{name} has ids from {ids.min()} to {ids.max()}; this model's are 0 to {vocabulary_size - 1}"
            )
    return layout, prompts, completions, lengths
