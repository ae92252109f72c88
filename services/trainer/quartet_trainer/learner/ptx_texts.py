"""Reads the texts of `ptx.data`. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quartet_trainer.errors import LearnerError


def read_texts(file: Path, vocabulary_size: int, longest: int | None) -> list[np.ndarray]:
    """Return the texts, int64 [tokens] each.

    Args:
        file: JSONL with {"input_ids": [1, 2, 3]} a line.
        vocabulary_size: ids must be below it.
        longest: tokens that the model can read; None: any number.

    Raises:
        LearnerError: a line that is no text of this model; the sentence names it.
    """
    texts = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LearnerError(f"trainer.ptx.data: {file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"trainer.ptx.data: {file}, line {number}"
        try:
            ids = json.loads(line)["input_ids"]
            text = np.array(ids, dtype=np.int64)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise LearnerError(f'{where}: expected {{"input_ids": [1, 2, 3]}}, got {line[:80]!r}') from error
        if text.ndim != 1 or text.size < 2 or not all(type(token) is int for token in ids):
            raise LearnerError(f"{where}: input_ids must be a list of at least two whole numbers")
        if text.min() < 0 or text.max() >= vocabulary_size:
            allowed = f"this model's are 0 to {vocabulary_size - 1}"
            raise LearnerError(f"{where}: input_ids has ids from {text.min()} to {text.max()}; {allowed}")
        if longest is not None and text.size > longest:
            raise LearnerError(f"{where}: input_ids has {text.size} tokens; the model reads at most {longest}")
        texts.append(text)
    if not texts:
        raise LearnerError(f"trainer.ptx.data: {file} has no line")
    return texts
