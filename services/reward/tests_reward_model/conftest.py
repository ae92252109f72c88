"""Tiny random sequence classification models, saved as users save theirs."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # reward_samples

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+=?."
PAD, END = "<|pad|>", "<|im_end|>"


@dataclass(frozen=True)
class Saved:
    """A model folder, and the model and tokenizer that are in it."""

    folder: Path
    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerFast

    def logits(self, text: str) -> list[float]:
        """What plain transformers say of one text, unpadded."""
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            return self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].tolist()


def save(folder: Path, kind: str, padded: bool = True) -> Saved:
    """Make a random model of one token a character and save it."""
    # Byte-level, without merges: beside a qwen2 config.json, AutoTokenizer reads any other kind as another class.
    vocabulary = {token: i for i, token in enumerate([PAD, END, *LETTERS.replace(" ", "\u0120")])}
    inner = Tokenizer(models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"eos_token": END} | ({"pad_token": PAD} if padded else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    torch.manual_seed(7)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.5, "max_position_embeddings": 256}
    pad = vocabulary[PAD] if padded else None
    if kind == "qwen2":
        config = Qwen2Config(**sizes, num_key_value_heads=2, num_labels=1, pad_token_id=pad)
        model = Qwen2ForSequenceClassification(config)
    elif kind == "roberta":
        model = RobertaForSequenceClassification(RobertaConfig(**sizes, num_labels=1, pad_token_id=pad))
    else:
        model = BertForSequenceClassification(BertConfig(**sizes, num_labels=3, pad_token_id=pad))
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Saved(folder, model, tokenizer)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory) -> Saved:
    """A decoder with one label: the common form of reward models."""
    return save(tmp_path_factory.mktemp("qwen2"), "qwen2")
