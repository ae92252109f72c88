"""PTX: a language-model loss on given texts beside the policy's (Ouyang et al. 2022, arXiv:2203.02155, eq. 2).

They are rows as in supervised fine-tuning. Those of a step depend on its number alone, so they are the same after a
restart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.rows import Row, RowReader, rows_of_step


class PretrainingTexts:
    """The rows of `ptx.data`, reshuffled for each pass over them."""

    def __init__(self, settings: LearnerSettings, reader: RowReader) -> None:
        """Read the file by `reader`. Uses `ptx`, `seed` and `micro_batch_tokens`. Raises LearnerError."""
        assert settings.ptx.data is not None, "there are texts only where ptx.data names a file"
        self._rows = reader.read(settings.ptx.data, "trainer.ptx.data")
        self._per_step = settings.ptx.sequences_per_step
        self._seed = settings.seed
        self._micro_batch_tokens = settings.micro_batch_tokens

    def micro_batches(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        """This rank's rows of a step. Weights: 1 / tokens in the loss of the step over all ranks; on the CPU."""
        places = rows_of_step(step, self._per_step, len(self._rows), self._seed)
        chosen = sorted((self._rows[place] for place in places), key=lambda row: row.token_ids.size, reverse=True)
        predicted = sum(int(row.in_loss.sum()) for row in chosen)
        return [_collate(rows, 1 / predicted) for rows in _split(chosen[rank::size], self._micro_batch_tokens)]


def _split(longest_first: list[Row], tokens: int) -> Iterator[list[Row]]:
    begin = 0
    while begin < len(longest_first):
        count = max(1, tokens // longest_first[begin].token_ids.size)
        yield longest_first[begin : begin + count]
        begin += count


def _collate(chosen: list[Row], weight: float) -> MicroBatch:
    """A micro-batch that predicts the tokens in the loss, at temperature 1."""
    longest = chosen[0].token_ids.size
    input_ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
    in_loss = torch.zeros(len(chosen), longest, dtype=torch.bool)
    for number, row in enumerate(chosen):
        input_ids[number, : row.token_ids.size] = torch.from_numpy(row.token_ids)
        in_loss[number, : row.token_ids.size] = torch.from_numpy(row.in_loss)
    rows, columns = torch.nonzero(in_loss[:, 1:], as_tuple=True)
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
