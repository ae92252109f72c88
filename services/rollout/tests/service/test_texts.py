"""Texts to tokens and back are what transformers says, at less cost."""

import asyncio
from typing import Any

import pytest
from quartet.v1 import broker_pb2, experience_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quartet_rollout.generation import PromptRefused
from quartet_rollout.prompts import PromptReader, Texts

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


async def test_the_event_loop_goes_on_while_a_long_prompt_is_read() -> None:
    """A tokenizer takes megabytes seconds, which it does not share with other threads unless it is asked to."""
    reader = PromptReader(word_piece(), max_model_len=190_000)
    long = experience_pb2.Prompt(text="hello worlds ! " * 50_000)
    reading = asyncio.ensure_future(reader.read_in_turn(long, None, experience_pb2.PURPOSE_SERVE))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(PromptRefused, match="200000 tokens"):
        await reading
    assert turns > 100


def test_a_text_that_cannot_fit_is_refused_by_its_length_unless_it_is_to_be_shortened() -> None:
    reader = PromptReader(word_piece(), max_model_len=20_000)
    text = "hello worlds ! " * 8_000
    with pytest.raises(PromptRefused, match="120000 characters; allowed: at most 100000: the model's context of 20000"):
        reader.read(experience_pb2.Prompt(text=text), None, experience_pb2.PURPOSE_SERVE)
    spec = broker_pb2.RunSpec(long_prompts=broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT)
    token_ids, _ = reader.read(experience_pb2.Prompt(text=text), spec, experience_pb2.PURPOSE_TRAIN)
    assert 0 < token_ids.size < 20_000
