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
from quartet_trainer.learner_settings import LOWEST_TEMPERATURE
from quartet_weights.routed_experts import Routing

_NUMPY: dict[int, np.dtype] = {
    tensor_pb2.DTYPE_UINT8: np.dtype(np.uint8),
    tensor_pb2.DTYPE_INT32: np.dtype(np.int32),
    tensor_pb2.DTYPE_INT64: np.dtype(np.int64),
    tensor_pb2.DTYPE_FLOAT32: np.dtype(np.float32),
}


class ExperienceError(ValueError):
    """A group violates the contract; the message is one sentence that names the field and what was expected."""


def one_dimension(message: tensor_pb2.Tensor, dtype: int, where: str) -> np.ndarray:
    """Decode a one-dimensional tensor. Raises ExperienceError."""
    values = view(message.dtype, message.data, dtype, where)
    if list(message.shape) != [values.size]:
        raise ExperienceError(
            f"{where} has shape {list(message.shape)} and {values.size} elements; it has one dimension"
        )
    return values


def all_rows(message: tensor_pb2.RaggedTensor, dtype: int, lengths: np.ndarray, where: str) -> np.ndarray:
    """Decode the concatenated rows of a ragged tensor, which must have these lengths. Raises ExperienceError."""
    values, own = rows(message, dtype, where)
    if not np.array_equal(own, lengths):
        raise ExperienceError(f"{where} has other row lengths than completion_token_ids")
    return values


def rows(message: tensor_pb2.RaggedTensor, dtype: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Decode a ragged tensor into its concatenated rows and their lengths, int64. Raises ExperienceError."""
    values = view(message.dtype, message.data, dtype, where)
    lengths = np.array(message.lengths, dtype=np.int64)
    if (lengths < 0).any():
        raise ExperienceError(f"{where} has a row of {lengths.min()} elements")
    if lengths.sum() != values.size:
        raise ExperienceError(f"{where} has {values.size} elements in rows of {lengths.sum()}")
    return values, lengths


def view(given: int, data: bytes, dtype: int, where: str) -> np.ndarray:
    """View bytes of dtype `given` as elements of `dtype`. Raises ExperienceError if they differ."""
    if given != dtype:
        raise ExperienceError(f"{where} is {_name(given)}; the contract says {_name(dtype)}")
    if len(data) % _NUMPY[dtype].itemsize:
        raise ExperienceError(f"{where} has {len(data)} bytes, not whole elements of {_name(dtype)}")
    return np.frombuffer(data, dtype=_NUMPY[dtype])


def _name(dtype: int) -> str:
    return (
        tensor_pb2.Dtype.Name(dtype).removeprefix("DTYPE_").lower()
        if dtype in tensor_pb2.Dtype.values()
        else str(dtype)
    )


def must_be_finite(values: np.ndarray, where: str) -> None:
    """Raise ExperienceError if they are not."""
    if not np.isfinite(values).all():
        raise ExperienceError(f"{where} has values that are not finite")


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
    group: experience_pb2.GroupTensors, prompt_tokens: int, lengths: np.ndarray, routing: Routing
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the experts of the prompt's and of all completions' tokens, each [tokens, layers, chosen]. A completion's
    last token gets those of the previous token. Raises ExperienceError."""
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
    place = np.where(
        lengths[row] > 1, 1 + (np.cumsum(computed) - computed)[row] + np.minimum(offset, computed[row] - 1), 0
    )
    return prompt, np.concatenate([prompt[-1:], given])[place]


@dataclass(frozen=True)
class ExperienceBatch:
    """N completions of B groups, T completion tokens in all, on the CPU, without padding."""

    tokens: Tensor
    """int32: all prompts, one per group, then the T completion tokens."""
    prompt_starts: Tensor
    """int64 [N]: index into `tokens` of the completion's prompt."""
    prompt_lengths: Tensor
    """int64 [N], each >= 1."""
    completion_starts: Tensor
    """int64 [N]: index of the completion's first among the T completion tokens."""
    completion_lengths: Tensor
    """int64 [N], each >= 0."""
    rows: Tensor
    """int64 [T]: the completion of each completion token."""
    groups: Tensor
    """int64 [N]: the group of each completion."""
    rollout_log_probs: Tensor
    """float32 [T]: under the distribution that the token was sampled from."""
    loss_mask: Tensor
    """bool [T]: true where the policy generated the token."""
    rewards: Tensor
    """float32 [N]."""
    temperatures: Tensor
    """float32 [N], each > 0."""
    truncated: Tensor
    """bool [N]: the completion ended at its length limit."""
    format_acc: Tensor
    """float32 [N]."""
    ans_acc: Tensor
    """float32 [N]; 0 where the answer was not judged."""
    ans_judged: Tensor
    """bool [N]: a verifier judged whether the answer is right."""
    candidates: Candidates | None = None
    """With sampling masks."""
    routed_experts: Tensor | None = None
    """With router replay: uint8 or int32 [tokens, hidden layers, experts of a token], in the order of `tokens`. A
    completion's last token, for which the engine ran no forward pass, has those of the previous token."""

    @property
    def completions(self) -> int:
        """N."""
        return self.rewards.numel()

    @property
    def completion_tokens(self) -> Tensor:
        """int32 [T]: the part of `tokens` after the prompts."""
        return self.tokens[self.tokens.numel() - self.rows.numel() :]


def decode_groups(
    groups: Sequence[experience_pb2.GroupTensors],
    vocabulary_size: int,
    *,
    sampling_masks: bool = False,
    routing: Routing | None = None,
    longest: int | None = None,
) -> ExperienceBatch:
    """Decode groups into one batch. The messages' bytes are copied once, when they are concatenated.

    Args:
        groups: at least one.
        vocabulary_size: token ids must be below it.
        sampling_masks: whether each group must have sampling masks; otherwise they are ignored.
        routing: the model's, if each group must have routed experts; otherwise they are ignored.
        longest: the model's `quartet_common.model_folder.fixed_rope_length`.

    Raises:
        ExperienceError: a field is missing, of another dtype or length, or has a value that cannot be trained on.
    """
    if not groups:
        raise ExperienceError("the batch has no group; a step trains at least one")
    parts = []
    try:
        for group in groups:
            parts.append(
                decode_group(group, vocabulary_size, sampling_masks=sampling_masks, routing=routing, longest=longest)
            )
    except ExperienceError as error:
        raise ExperienceError(f"group {len(parts)}: {error}") from error
    prompt_lengths = np.array([part["prompt"].size for part in parts])
    sizes = np.array([part["lengths"].size for part in parts])
    group_of_row = np.repeat(np.arange(len(parts)), sizes)
    lengths = np.concatenate([part["lengths"] for part in parts])

    def join(*names: str) -> Tensor:
        return torch.from_numpy(np.concatenate([part[name] for name in names for part in parts]))

    candidates = None
    if sampling_masks:
        counts = join("mask_counts").long()
        candidates = Candidates(counts=counts, starts=counts.cumsum(0) - counts, token_ids=join("mask_ids"))
    return ExperienceBatch(
        tokens=join("prompt", "completions"),
        prompt_starts=torch.from_numpy((np.cumsum(prompt_lengths) - prompt_lengths)[group_of_row]),
        prompt_lengths=torch.from_numpy(prompt_lengths[group_of_row]),
        completion_starts=torch.from_numpy(np.cumsum(lengths) - lengths),
        completion_lengths=torch.from_numpy(lengths),
        rows=torch.from_numpy(np.repeat(np.arange(lengths.size), lengths)),
        groups=torch.from_numpy(group_of_row),
        rollout_log_probs=join("log_probs"),
        loss_mask=join("loss_mask").bool(),
        rewards=join("rewards"),
        temperatures=join("temperatures"),
        truncated=join("truncated").bool(),
        format_acc=join("format_acc"),
        ans_acc=join("ans_acc"),
        ans_judged=join("ans_judged").bool(),
        candidates=candidates,
        routed_experts=None if routing is None else join("prompt_experts", "completion_experts"),
    )


def decode_group(
    group: experience_pb2.GroupTensors,
    vocabulary_size: int,
    *,
    sampling_masks: bool = False,
    routing: Routing | None = None,
    longest: int | None = None,
) -> dict[str, np.ndarray]:
    """Decode one group into arrays by name, views of the message's bytes. Arguments and errors: see `decode_groups`."""
    prompt, completions, lengths = _decode_tokens(group, vocabulary_size, longest)
    if group.HasField("loss_mask") and group.loss_mask.lengths:
        loss_mask = all_rows(group.loss_mask, tensor_pb2.DTYPE_UINT8, lengths, "loss_mask")
    else:
        loss_mask = np.ones(completions.size, dtype=np.uint8)
    _, spans = rows(group.version_spans, tensor_pb2.DTYPE_INT64, "version_spans")
    if spans.size != lengths.size or (spans % 3).any():
        raise ExperienceError(
            f"version_spans has rows of {spans.tolist()[:8]}; each completion has one row, of triples"
        )

    def per_completion(field: str, dtype: int = tensor_pb2.DTYPE_FLOAT32) -> np.ndarray:
        array = one_dimension(getattr(group, field), dtype, field)
        if array.size != lengths.size:
            raise ExperienceError(f"{field} has {array.size} values for {lengths.size} completions")
        must_be_finite(array, field)
        return array

    log_probs = all_rows(group.rollout_log_probs, tensor_pb2.DTYPE_FLOAT32, lengths, "rollout_log_probs")
    must_be_finite(log_probs, "rollout_log_probs")
    temperatures = per_completion("temperatures")
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
        "prompt": prompt,
        "completions": completions,
        "lengths": lengths,
        "log_probs": log_probs,
        "loss_mask": loss_mask,
        "temperatures": temperatures,
        **{name: per_completion(name) for name in ("rewards", "format_acc", "ans_acc")},
        "truncated": per_completion("truncated", tensor_pb2.DTYPE_UINT8),
        "ans_judged": np.ones(lengths.size, dtype=np.uint8),
    }
    if group.HasField("ans_judged"):
        arrays["ans_judged"] = per_completion("ans_judged", tensor_pb2.DTYPE_UINT8)
    if sampling_masks:
        masks = decode_candidates(group, completions, lengths, loss_mask, vocabulary_size)
        arrays["mask_counts"], arrays["mask_ids"] = masks
    if routing is not None:
        experts = decode_routed_experts(group, prompt.size, lengths, routing)
        arrays["prompt_experts"], arrays["completion_experts"] = experts
    return arrays


def _decode_tokens(
    group: experience_pb2.GroupTensors, vocabulary_size: int, longest: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode the prompt's ids, all completions' ids and the completions' lengths."""
    prompt = one_dimension(group.prompt_token_ids, tensor_pb2.DTYPE_INT32, "prompt_token_ids")
    completions, lengths = rows(group.completion_token_ids, tensor_pb2.DTYPE_INT32, "completion_token_ids")
    if prompt.size == 0:
        raise ExperienceError("prompt_token_ids is empty; a prompt has at least one token")
    if lengths.size == 0:
        raise ExperienceError("completion_token_ids has no row; a group has at least one completion")
    tokens = prompt.size + int(lengths.max())
    if longest is not None and tokens > longest:
        raise ExperienceError(f"a completion has {tokens} tokens with its prompt; allowed: {at_most(longest)}")
    for name, ids in (("prompt_token_ids", prompt), ("completion_token_ids", completions)):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary_size):
            raise ExperienceError(
                f"{name} has ids from {ids.min()} to {ids.max()}; this model's are 0 to {vocabulary_size - 1}"
            )
    return prompt, completions, lengths
