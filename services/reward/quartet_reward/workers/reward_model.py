"""The worker process of the reward model. Run by `python -m quartet_reward.workers.reward_model`.

-> {"texts": ["…", …]}
<- {"event": "done", "logits": [[0.3], …], "tokens": [17, …], "cut": [0, …]}   `cut`: tokens dropped
<- {"event": "failed", "reason": "…"}
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quartet_reward.config import RewardModelSection
from quartet_server import worker_protocol

# More than any tokenizer's average: longer texts are cut before they are tokenized.
_CHARACTERS_PER_TOKEN = 64


class Classifier:
    """A model and its tokenizer."""

    def __init__(self, section: RewardModelSection):
        """Load both. Raises OSError, ValueError: the folder holds no such model."""
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
        self._max_tokens = min(section.max_tokens, positions - self._unused_positions())
        # Models that pool the last token find it by the pad token's id: without a valid one, rows cannot be padded.
        pad, vocabulary = self._tokenizer.pad_token_id, self._model.get_input_embeddings().num_embeddings
        if config.pad_token_id is None and pad is not None and pad < vocabulary:
            config.pad_token_id = pad
        self._pad = config.pad_token_id

    def _unused_positions(self) -> int:
        """Return how many positions are before a text's first token: RoBERTa's begin after that of padding."""
        embeddings = (each for name, each in self._model.named_modules() if name.endswith("position_embeddings"))
        padding = [each.padding_idx for each in embeddings if isinstance(each, torch.nn.Embedding)]
        return max((index + 1 for index in padding if index is not None), default=0)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            rows, cut = self.read(request["texts"])
            if not all(rows):
                raise ValueError("a text without tokens")
            return {"event": "done", "logits": self.logits(rows), "tokens": [len(row) for row in rows], "cut": cut}
        except Exception as error:
            # A CUDA error may persist in the process, so that is replaced.
            last = self._device != "cpu"
            return {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:500], "last": last}

    def read(self, texts: list[str]) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of each text, and how many tokens were cut from its beginning."""
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
        """Return the logits of each row; rows of similar length share a forward pass."""
        logits: list[list[float]] = [[] for _ in rows]
        for indices in self._passes(rows):
            for index, values in zip(indices, self._forward([rows[i] for i in indices]), strict=True):
                logits[index] = values
        return logits

    def _passes(self, rows: list[list[int]]) -> list[list[int]]:
        """Return the row indices of each forward pass: at most `batch_tokens` tokens, padding included."""
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--section", type=RewardModelSection.model_validate_json, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()

    def load() -> worker_protocol.Answer:
        torch.set_num_threads(arguments.section.threads)
        return Classifier(arguments.section).answer

    worker_protocol.serve(arguments.parent, load)


if __name__ == "__main__":
    main()
