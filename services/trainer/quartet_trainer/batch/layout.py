"""How the rows of a group make its completions, and the turns of the policy in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from quartet.v1 import experience_pb2, tensor_pb2

from quartet_trainer.algorithms.turns import Turns
from quartet_trainer.batch.tensors import ExperienceError, all_rows, must_be_finite, one_dimension, rows


@dataclass(frozen=True)
class Layout:
    """The R rows of a group's G completions; indices count from 0 in the group."""

    prompt_lengths: np.ndarray
    """int64 [Q]: of the prompts, which are concatenated."""
    row_prompts: np.ndarray
    """int64 [R]: the prompt of each row."""
    row_completions: np.ndarray
    """int64 [R]: the completion of each row, not decreasing."""
    seats: np.ndarray
    """int64 [G]: the seat of each completion."""
    prompts_field: str
    """The field that has the prompts."""


def decode_layout(group: experience_pb2.GroupTensors, row_count: int) -> tuple[Layout, np.ndarray]:
    """Decode the layout and the ids of all prompts, int32. Raises ExperienceError."""
    if not group.HasField("prompts"):
        for field in ("row_prompts", "row_completions", "seats"):
            if group.HasField(field):
                raise ExperienceError(f"{field} is set without prompts; allowed: together")
        prompt = one_dimension(group.prompt_token_ids, tensor_pb2.DTYPE_INT32, "prompt_token_ids")
        if prompt.size == 0:
            raise ExperienceError("prompt_token_ids is empty; a prompt has at least one token")
        alone, each = np.zeros(row_count, dtype=np.int64), np.arange(row_count)
        return Layout(np.array([prompt.size]), alone, each, alone, "prompt_token_ids"), prompt
    prompts, prompt_lengths = rows(group.prompts, tensor_pb2.DTYPE_INT32, "prompts")
    if not prompt_lengths.size or prompt_lengths.min() == 0:
        raise ExperienceError("prompts is empty, or has an empty row; a prompt has at least one token")
    completions = one_dimension(group.rewards, tensor_pb2.DTYPE_FLOAT32, "rewards").size
    row_prompts = _indices(group.row_prompts, row_count, prompt_lengths.size, "row_prompts")
    row_completions = _indices(group.row_completions, row_count, completions, "row_completions")
    if (np.diff(row_completions) < 0).any():
        raise ExperienceError("row_completions decreases; the rows of a completion follow one another")
    seats = np.zeros(completions, dtype=np.int64)
    if group.HasField("seats"):
        seats = np.unique(_indices(group.seats, completions, completions, "seats"), return_inverse=True)[1]
    return Layout(prompt_lengths, row_prompts, row_completions, seats, "prompts"), prompts


def _indices(message: tensor_pb2.Tensor, size: int, below: int, where: str) -> np.ndarray:
    found = one_dimension(message, tensor_pb2.DTYPE_INT32, where).astype(np.int64)
    if found.size != size:
        raise ExperienceError(f"{where} has {found.size} values; expected: {size}")
    if size and not (found.min() >= 0 and found.max() < below):
        raise ExperienceError(f"{where} has {found.min()} to {found.max()}; allowed: 0 to {below - 1}")
    return found


def decode_turns(
    group: experience_pb2.GroupTensors,
    layout: Layout,
    tokens: np.ndarray,
    lengths: np.ndarray,
    loss_mask: np.ndarray,
    outcomes: np.ndarray,
) -> Turns:
    """Decode a group's turns; without them each row is one. Raises ExperienceError.

    Args:
        tokens: int32 [T], of all rows.
        lengths: int64 [R], of the rows.
        loss_mask: uint8 [T].
        outcomes: float32 [G].
    """
    starts = np.cumsum(lengths) - lengths
    if group.HasField("turn_ends"):
        ends, counts = rows(group.turn_ends, tensor_pb2.DTYPE_INT32, "turn_ends")
        given = all_rows(group.turn_indices, tensor_pb2.DTYPE_INT32, counts, "turn_indices", "turn_ends")
        rewards = all_rows(group.turn_rewards, tensor_pb2.DTYPE_FLOAT32, counts, "turn_rewards", "turn_ends")
        must_be_finite(rewards, "turn_rewards")
    else:
        if group.HasField("prompts"):
            raise ExperienceError("turn_ends is missing; a group with prompts of its rows has it")
        ends, counts, given = lengths, np.ones_like(lengths), np.zeros_like(lengths)
        rewards = np.zeros(lengths.size)
    if counts.size != lengths.size or not counts.all():
        raise ExperienceError(f"turn_ends has rows of {counts.tolist()[:8]} turns; each of {lengths.size} has some")
    row = np.repeat(np.arange(counts.size), counts)
    first = np.concatenate([[True], row[1:] != row[:-1]])
    begins = np.where(first, 0, np.concatenate([[0], ends[:-1]]))
    if (ends < begins).any() or not np.array_equal(ends[np.cumsum(counts) - 1], lengths):
        raise ExperienceError("turn_ends does not ascend to the length of its row")
    completions = layout.row_completions[row]
    order = np.lexsort((given, completions))
    numbers = np.arange(row.size) - np.searchsorted(completions, completions)
    if not np.array_equal(given[order], numbers):
        raise ExperienceError("turn_indices does not number the turns of each completion from 0, each once")
    return Turns(
        of_token=torch.from_numpy(np.repeat(np.arange(row.size), ends - begins)),
        completions=torch.from_numpy(completions),
        indices=torch.from_numpy(given.astype(np.int64)),
        states=torch.from_numpy(_states(layout, tokens, starts, row, begins, loss_mask)),
        rewards=torch.from_numpy(rewards.astype(np.float64)),
        outcomes=torch.from_numpy(outcomes.astype(np.float64)),
    )


def _states(
    layout: Layout,
    tokens: np.ndarray,
    starts: np.ndarray,
    row: np.ndarray,
    begins: np.ndarray,
    loss_mask: np.ndarray,
) -> np.ndarray:
    """Number what the policy had read when each turn began, per seat, from 0, int64 [U]."""
    if row.size == layout.row_prompts.size:  # nothing was read after the prompts
        read: list[tuple[int, bytes]] = [(prompt, b"") for prompt in layout.row_prompts.tolist()]
    else:
        read = []
        for one, begin in zip(row.tolist(), begins.tolist(), strict=True):
            mask = loss_mask[starts[one] + begin :]
            end = starts[one] + begin + (int(mask.argmax()) if mask.size else 0)  # after what was inserted
            digest = blake2b(tokens[starts[one] : end].tobytes(), digest_size=16)
            read.append((int(layout.row_prompts[one]), digest.digest()))
    seats = layout.seats[layout.row_completions[row]].tolist()
    numbers: dict[tuple[int, int, bytes], int] = {}
    return np.array(
        [numbers.setdefault((seat, *state), len(numbers)) for seat, state in zip(seats, read, strict=True)],
        dtype=np.int64,
    )


def join_turns(parts: Sequence[Turns]) -> Turns:
    """Concatenate the turns of groups; indices into turns and completions, and states, count on."""
    turns, completions, states = 0, 0, 0
    shifted = []
    for part in parts:
        shifted.append((part.of_token + turns, part.completions + completions, part.states + states))
        turns += part.rewards.numel()
        completions += part.outcomes.numel()
        states += int(part.states.max()) + 1
    of_token, of_completion, of_state = (torch.cat(column) for column in zip(*shifted, strict=True))
    return Turns(
        of_token=of_token,
        completions=of_completion,
        indices=torch.cat([part.indices for part in parts]),
        states=of_state,
        rewards=torch.cat([part.rewards for part in parts]),
        outcomes=torch.cat([part.outcomes for part in parts]),
    )
