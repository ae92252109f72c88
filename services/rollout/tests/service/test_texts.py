"""Texts to tokens: what one user of the tokenizer sets is nobody else's, and long texts hold nothing up."""

import asyncio
import copy

import pytest
from quartet.v1 import broker_pb2, experience_pb2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet_rollout.environments import Answer
from quartet_rollout.environments.conversation import AnswerWriter
from quartet_rollout.generation import PromptRefused
from quartet_rollout.prompts import PromptReader


def word_piece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", "!", ".", "[", "]", "SEP"]
    beneath = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    beneath.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=beneath, unk_token="[UNK]", sep_token="[SEP]")


def test_a_special_token_is_one_in_a_prompt_and_plain_text_in_an_answer_whichever_came_before() -> None:
    tokenizer = word_piece()
    reader, writer = PromptReader(tokenizer, max_model_len=100), AnswerWriter(copy.deepcopy(tokenizer))
    prompt = experience_pb2.Prompt(text="hello [SEP] worlds!")
    for _ in range(2):
        token_ids, _ = reader.read(prompt, None, experience_pb2.PURPOSE_SERVE)
        assert token_ids.dtype == "int32" and token_ids.tolist() == [2, 1, 3, 4, 5]
        assert writer.write(Answer("[SEP]"), chat=None, last_token=0, room=50, most=50).tolist() == [7, 9, 8]


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
