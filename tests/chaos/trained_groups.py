"""A callback of the trainer that writes what each batch consists of: `trained.jsonl` in the run's folder."""

import json

import numpy as np

from quartet_common.tensors import decode, decode_ragged
from quartet_trainer.callbacks import BatchEvent, Callback

TRAINED = "trained.jsonl"


class TrainedGroups(Callback):
    """Appends a line for each group: the tokens that the policy sampled for each completion, and its reward."""

    def on_batch(self, batch: BatchEvent) -> None:
        """Append the groups of a batch. A batch that is trained again after a restart is appended again."""
        with (self.training.folder / TRAINED).open("a") as file:
            for header, tensors in zip(batch.headers, batch.groups, strict=True):
                rewards = decode(tensors.rewards).tolist()
                tokens: list[list[int]] = [[] for _ in rewards]
                rows = decode_ragged(tensors.completion_token_ids)
                masks = decode_ragged(tensors.loss_mask) if tensors.loss_mask.lengths else map(np.ones_like, rows)
                several = tensors.HasField("row_completions")
                owners = decode(tensors.row_completions).tolist() if several else range(len(rows))
                for owner, row, mask in zip(owners, rows, masks, strict=True):
                    tokens[owner] += row[mask == 1].tolist()
                line = {"instance": header.instance_id, "step": batch.step, "rewards": rewards, "tokens": tokens}
                file.write(json.dumps(line) + "\n")
