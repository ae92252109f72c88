"""The process of the reward model. `python -m quartet_reward.workers.reward_model`; lines of JSON, as the others:

-> {"texts": ["…", …]}
<- {"event": "done", "logits": [[0.3], …], "tokens": [17, …], "cut": [0, …]}   `cut`: how many were dropped
 | {"event": "failed", "reason": "…"}
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quartet_reward.config import RewardModelSection
from quartet_reward.workers import protocol

# No tokenizer has a token of more characters on average: what is longer is cut before it is tokenized.
_CHARACTERS_PER_TOKEN = 64


class Classifier:
    """A model and its tokenizer."""

    def __init__(self, section: RewardModelSection):
        """Load them. Raises OSError, ValueError: the folder holds no such model."""
        path = section.path
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        self._add_special_tokens = section.add_special_tokens
        self._model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, section.dtype), use_safetensors=True
        )
        self._model.to(section.device).eval()
        self._device = section.device
        self._batch_tokens = section.batch_tokens
        config = self._model.config
        positions = getattr(config, "max_position_embeddings", None) or section.max_tokens
        self._max_tokens = min(section.max_tokens, positions)
        # Models that read the last token find it by this id: without one that they know, nothing can be padded.
        given, known = self._tokenizer.pad_token_id, self._model.get_input_embeddings().num_embeddings
        if config.pad_token_id is None and given is not None and given < known:
            config.pad_token_id = given
        self._pad = config.pad_token_id

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            rows, cut = self.read(request["texts"])
            if not all(rows):
                raise ValueError("a text without tokens")
            return {"event": "done", "logits": self.logits(rows), "tokens": [len(row) for row in rows], "cut": cut}
        except Exception as error:  # whatever the model raises is told to the service
            # An error on a GPU may stay with the process: a fresh one takes its place.
            last = self._device != "cpu"
            return {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:500], "last": last}

    def read(self, texts: list[str]) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of texts, and how many of each were cut off at the beginning."""
        most = self._max_tokens * _CHARACTERS_PER_TOKEN
        texts = [text[-most:] for text in texts]
        rows = self._tokenize(texts, truncation=True, max_length=self._max_tokens)
        full = [i for i, row in enumerate(rows) if len(row) == self._max_tokens]
        cut = [0] * len(rows)
        for i, row in zip(full, self._tokenize([texts[i] for i in full]) if full else [], strict=True):
            cut[i] = len(row) - self._max_tokens
        return rows, cut

    def _tokenize(self, texts: list[str], **options) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=self._add_special_tokens, **options)["input_ids"]

    def logits(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the logits of each row; rows of like lengths share a forward pass."""
        found: list[list[float]] = [[] for _ in rows]
        for indices in self._passes(rows):
            for index, values in zip(indices, self._forward([rows[i] for i in indices]), strict=True):
                found[index] = values
        return found

    def _passes(self, rows: list[list[int]]) -> list[list[int]]:
        passes: list[list[int]] = []
        for index in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            last = passes[-1] if passes else []
            fits = last and self._pad is not None and len(rows[index]) * (len(last) + 1) <= self._batch_tokens
            if fits:
                last.append(index)
            else:
                passes.append([index])
        return passes

    def _forward(self, rows: list[list[int]]) -> list[list[float]]:
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self._pad or 0)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        return output.logits.float().cpu().tolist()


def main() -> None:
    """Load the model, say so, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--section", type=RewardModelSection.model_validate_json, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()

    def load() -> protocol.Answer:
        torch.set_num_threads(arguments.section.threads)
        return Classifier(arguments.section).answer

    protocol.serve(arguments.parent, load)


if __name__ == "__main__":
    main()
