"""The experience that the broker's benchmarks send: one prompt group as arrays. Numpy alone: the Ray peers use it too.

A group is 8 completions of up to 2048 tokens: token ids (int32), log-probs (float32) and loss mask (uint8), 9 bytes a
token. `padded` sends every completion at full length (147 KB), as ColossalChat does; `ragged` sends what was generated,
30% of it (44 KB), as our rollout does. `short`, for runs of many steps, has completions of a few tokens (1 KB).
"""

import zlib
from collections.abc import Iterable

import numpy as np

COMPLETIONS, LONGEST, PROMPT_TOKENS = 8, 2048, 100
SHAPES = ("padded", "ragged")
RAGGED_LENGTHS = (400, 829)  # 30% of LONGEST in the mean
SHORT_LENGTHS = (4, 12)

# Rows of different lengths are concatenated; `lengths` has their lengths.
PER_TOKEN = ("completion_token_ids", "rollout_log_probs", "loss_mask")
PER_COMPLETION = ("rewards", "temperatures", "truncated", "format_acc", "ans_acc")

Arrays = dict[str, np.ndarray]


def make_groups(shape: str, count: int, seed: int = 0) -> list[Arrays]:
    """Return groups of a shape, the same for the same seed in every process."""
    rng = np.random.default_rng(seed)
    return [_make(shape, rng) for _ in range(count)]


def _make(shape: str, rng: np.random.Generator) -> Arrays:
    bounds = SHORT_LENGTHS if shape == "short" else RAGGED_LENGTHS
    lengths = np.full(COMPLETIONS, LONGEST) if shape == "padded" else rng.integers(*bounds, COMPLETIONS)
    tokens = int(lengths.sum())
    spans = np.zeros((COMPLETIONS, 3), dtype=np.int64)
    spans[:, 2] = lengths
    return {
        "prompt_token_ids": rng.integers(0, 150_000, PROMPT_TOKENS).astype(np.int32),
        "completion_token_ids": rng.integers(0, 150_000, tokens).astype(np.int32),
        "rollout_log_probs": rng.normal(-1, 0.5, tokens).astype(np.float32),
        "loss_mask": np.ones(tokens, dtype=np.uint8),
        "lengths": lengths.astype(np.int64),
        "version_spans": spans.reshape(-1),
        "truncated": np.zeros(COMPLETIONS, dtype=np.uint8),
        **{name: rng.random(COMPLETIONS).astype(np.float32) for name in PER_COMPLETION if name != "truncated"},
    }


def checksum(groups: Iterable[Arrays]) -> int:
    """Return a number that is equal for equal groups, in whatever order they came."""
    total = 0
    for group in groups:
        one = 0
        for name in sorted(group):
            one = zlib.crc32(f"{name} {group[name].dtype} {group[name].shape}".encode(), one)
            one = zlib.crc32(np.ascontiguousarray(group[name]), one)
        total += one
    return total & 0xFFFFFFFFFFFFFFFF
