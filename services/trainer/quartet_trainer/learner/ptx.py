"""PTX: a language-model loss on given texts beside the policy's (Ouyang et al. 2022, arXiv:2203.02155, eq. 2).

The texts of a step depend on its number alone, so they are the same after a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.checks import read_texts
from quartet_trainer.learner_settings import LearnerSettings


class PretrainingTexts:
    """The texts of `ptx.data`, shuffled anew for each pass over them."""

    def __init__(self, settings: LearnerSettings, vocabulary_size: int, longest: int | None) -> None:
        """Read the file.

        Args:
            settings: `ptx`, `seed` and `micro_batch_tokens`.
            vocabulary_size: ids must be below it.
            longest: tokens that the model can read; None: any number.

        Raises:
            LearnerError: see `read_texts`.
        """
        assert settings.ptx.data is not None, "there are texts only where ptx.data names a file"
        self._file = settings.ptx.data
        self._texts = read_texts(self._file, vocabulary_size, longest)
        self._per_step = settings.ptx.sequences_per_step
        self._seed = settings.seed
        self._micro_batch_tokens = settings.micro_batch_tokens

    def micro_batches(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        """This rank's texts of a step. Weights: 1 / predicted tokens of the step over all ranks; on the CPU."""
        chosen = sorted(self._of_step(step), key=len, reverse=True)
        predicted = sum(len(text) - 1 for text in chosen)
        return [_collate(texts, 1 / predicted) for texts in _split(chosen[rank::size], self._micro_batch_tokens)]

    def _of_step(self, step: int) -> Iterator[np.ndarray]:
        count = len(self._texts)
        numbers = range(step * self._per_step, (step + 1) * self._per_step)
        for passed, of_pass in itertools.groupby(numbers, lambda number: number // count):
            order = np.random.default_rng([self._seed, passed]).permutation(count)
            for number in of_pass:
                yield self._texts[order[number % count]]


def _split(longest_first: list[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    begin = 0
    while begin < len(longest_first):
        count = max(1, tokens // len(longest_first[begin]))
        yield longest_first[begin : begin + count]
        begin += count


def _collate(texts: list[np.ndarray], weight: float) -> MicroBatch:
    """A micro-batch that predicts every token but a text's first, at temperature 1."""
    lengths = torch.tensor([len(text) for text in texts])
    input_ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = torch.from_numpy(text)
    columns = torch.arange(input_ids.shape[1] - 1)
    rows, columns = torch.nonzero(columns < (lengths - 1)[:, None], as_tuple=True)
    zeros = torch.zeros(rows.numel(), dtype=torch.float64)
    return MicroBatch(
        input_ids=input_ids,
        rows=rows,
        columns=columns,
        targets=input_ids[rows, columns + 1],
        sequences=rows,
        tokens=torch.arange(rows.numel()),
        temperatures=zeros + 1,
        rollout_log_probs=zeros,
        advantages=zeros,
        weights=zeros + weight,
    )
