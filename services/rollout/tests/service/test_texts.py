"""Texts to tokens and back are what transformers says, at less cost."""

from typing import Any

import pytest
from doubles import CharTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quartet_rollout.texts import Texts

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "hello", "world", "##s", "!", ".", "<", ">"]
TEXTS = ["hello worlds!", "", "hello [SEP] world", "nothing known", "hello world . " * 20]


def word_piece(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **values: Any) -> PreTrainedTokenizerFast:
    """One that adds tokens, pads and truncates, if it is let."""
    beneath = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    beneath.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    beneath.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    beneath.enable_truncation(4)
    beneath.enable_padding(length=12, pad_id=3, pad_token="[PAD]")
    specials = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return kind(tokenizer_object=beneath, **specials, **values)


class Shouting(PreTrainedTokenizerFast):
    """A class that has a part in the work itself."""

    def _decode(self, *arguments: Any, **values: Any) -> str:
        return super()._decode(*arguments, **values).upper()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_tokens_and_texts_are_those_of_transformers(kind: type, split: bool, text: str) -> None:
    theirs = word_piece(kind, split_special_tokens=split, clean_up_tokenization_spaces=True)
    expected = theirs.encode(text, add_special_tokens=False)
    texts = Texts(word_piece(kind, split_special_tokens=split, clean_up_tokenization_spaces=True))
    found = texts.encode(text)
    assert found.dtype == "int32" and found.tolist() == expected
    said = theirs.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert texts.decode(found.tolist()) == said


def test_a_text_of_any_tokenizer_can_be_sent() -> None:
    assert Texts(CharTokenizer()).decode([97, 0xD800, 98]) == r"a\ud800b"
