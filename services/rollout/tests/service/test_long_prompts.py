"""Prompts that are too long, under the policy that shortens them: what goes, and what never does."""

import numpy as np
import pytest
from doubles import CharTokenizer
from quartet.v1 import broker_pb2, experience_pb2
from transformers.utils.chat_template_utils import render_jinja_template

from quartet_common.tensors import encode
from quartet_rollout.generation import PromptRefused
from quartet_rollout.prompts import PromptReader

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateTokenizer(CharTokenizer):
    """One token per character, with a chat template, rendered as transformers does."""

    bos_token_id = ord("^")

    chat_template = CHATML

    def apply_chat_template(self, messages: list[dict], tokenize: bool, **options: bool) -> str:
        assert not tokenize
        (text,), _ = render_jinja_template([messages], chat_template=CHATML, **options)
        return text


def read(room: int, system_prompt: str = "", context: int = 10_000, **form) -> str:
    """What is left of a prompt for which there are `room` tokens, as text."""
    spec = broker_pb2.RunSpec(
        max_prompt_tokens=room,
        system_prompt=system_prompt,
        sampling=experience_pb2.SamplingParams(max_new_tokens=8),
        long_prompts=broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT,
    )
    reader = PromptReader(TemplateTokenizer(), context)
    token_ids, _ = reader.read(experience_pb2.Prompt(**form), spec, experience_pb2.PURPOSE_TRAIN)
    return reader.text(token_ids)


def chat(*turns: str) -> experience_pb2.Chat:
    roles = ("user", "assistant")
    return experience_pb2.Chat(
        messages=[experience_pb2.Message(role=roles[at % 2], content=turn) for at, turn in enumerate(turns)]
    )


def test_text_loses_its_first_tokens_but_not_the_beginning_of_sequence() -> None:
    assert read(4, text="0123456789") == "6789"
    assert read(4, text="^123456789") == "^789"
    assert read(10, text="^123456789") == "^123456789"
    ids = encode(np.frombuffer(b"^abcdef", np.uint8).astype(np.int32))
    assert read(3, token_ids=ids) == "^ef"
    assert read(0, text="0123456789", context=12) == "6789"  # 12 less 8 new tokens


def test_a_chat_loses_its_oldest_turns_whole_and_keeps_its_system_message() -> None:
    head, tail = "<|im_start|>system\nCount.<|im_end|>\n", "<|im_start|>assistant\n"
    whole = read(1000, "Count.", chat=chat("one" * 5, "two" * 5, "three" * 5))
    assert whole.startswith(head) and whole.endswith(tail)
    left = read(len(whole) - 1, "Count.", chat=chat("one" * 5, "two" * 5, "three" * 5))
    assert left == f"{head}<|im_start|>user\n{'three' * 5}<|im_end|>\n{tail}", "never an answer without its question"


def test_the_last_turn_is_cut_behind_its_header_and_before_the_generation_prompt() -> None:
    whole = read(1000, "Count.", chat=chat("0123456789"))
    assert read(len(whole) - 6, "Count.", chat=chat("older", "answer", "0123456789")) == whole.replace("012345", "")
    # What the template says of itself where there is no system message stays as well.
    whole = read(1000, chat=chat(" apples and pears"))
    assert "Be brief." in whole
    assert read(len(whole) - 7, chat=chat(" apples and pears")) == whole.replace("apples ", "")


def test_without_room_for_what_must_stay_a_prompt_is_refused() -> None:
    with pytest.raises(PromptRefused, match=r"of which \d+ at least must stay"):
        read(40, "Count." * 20, chat=chat("0123456789"))


def test_a_chat_of_many_turns_is_rendered_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn by turn it would take time in proportion to the square of their number."""
    rendered, render = [], TemplateTokenizer.apply_chat_template
    monkeypatch.setattr(
        TemplateTokenizer, "apply_chat_template", lambda *given, **more: rendered.append(1) or render(*given, **more)
    )
    turns = chat(*["turn"] * 2000)
    whole = read(10**6, chat=turns, context=10**7)
    for room in (len(whole) // 2, 150):
        rendered.clear()
        left = read(room, chat=turns, context=10**7)
        assert whole.endswith(left[left.index("turn") :]) and len(left) <= room
        assert room - len(left) < 2 * (len(whole) // 2000 + 1), "no more than need be"
        assert len(rendered) < 40
