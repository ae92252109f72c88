"""Supervised rows: their loss and gradients are transformers' own; which tokens of a row are in the loss."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import assert_near, gradients, make_batch, make_learner
from reference import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet_common.config import RunSection
from quartet_common.sft import SftSection
from quartet_trainer.algorithms.sft import Sft
from quartet_trainer.errors import LearnerError
from quartet_trainer.rows import Row, RowReader, rows_of_step

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
THINKING = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('/')[-1] }}")
"""Only the last turn keeps its thoughts, so that earlier ones change when turns follow."""


def save_tokenizer(folder: Path, template: str | None = None) -> Path:
    """One token for each printable character, and those of ChatML."""
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    characters = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    made.chat_template = template
    made.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    return folder


def read(folder: Path, *rows: Any, longest: int | None = None, **section: Any) -> list[Row]:
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return RowReader(folder, 200, longest, RunSection(), SftSection(**section)).read(file, "sft.data")


def in_loss(folder: Path, row: Row) -> list[str]:
    """The text of each run of tokens in the loss."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    runs = np.split(np.arange(row.in_loss.size), np.flatnonzero(np.diff(row.in_loss)) + 1)
    return [tokenizer.decode(row.token_ids[run]) for run in runs if row.in_loss[run[0]]]


# --- The loss ---------------------------------------------------------------------------------------------------------


def made_rows(seed: int = 0) -> list[Row]:
    """Unequal rows with gaps in their masks."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in (3, 17, 30, 8, 2, 22):
        row = Row(rng.integers(0, 64, length).astype(np.int32), rng.random(length) < 0.6)
        row.in_loss[0], row.in_loss[-1] = False, True
        rows.append(row)
    return rows


def of_transformers(model: torch.nn.Module, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss in float64 from the logits of padded rows, and the model's own, which rounds its logits to float32."""
    longest = max(row.token_ids.size for row in rows)
    ids, labels = torch.zeros(len(rows), longest).long(), torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        size, tokens = row.token_ids.size, torch.from_numpy(row.token_ids).long()
        ids[number, :size], labels[number, :size] = tokens, torch.where(torch.from_numpy(row.in_loss), tokens, -100)
    count = int((labels != -100).sum())
    output = model(input_ids=ids, labels=labels, num_items_in_batch=count)
    logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count, output.loss


@pytest.mark.parametrize(
    "cut", [{}, {"share_prompts": False}, {"micro_batch_tokens": 40}], ids=["packed", "padded", "cut"]
)
def test_loss_and_gradients_are_those_of_transformers(model_path: Path, cut: dict[str, Any]) -> None:
    rows = made_rows()
    learner, groups = make_learner(model_path, algorithm=Sft(), **cut), [row.as_group() for row in rows]
    model = load(model_path)
    loss, own = of_transformers(model, rows)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_near(gradients(learner, groups), expected, rtol=1e-10, atol=1e-10)
    assert -learner.log_probs(groups).mean().item() == pytest.approx(loss.item(), rel=1e-10)
    assert learner.train_step(groups)["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert own.item() == pytest.approx(loss.item(), rel=1e-6)
    # The step has changed the weights.
    assert -learner.log_probs(groups).mean().item() < loss.item() - 1e-3


def test_packed_rows_do_not_see_one_another(model_path: Path) -> None:
    learner, rows = make_learner(model_path, algorithm=Sft()), made_rows()
    alone = torch.cat([learner.log_probs([row.as_group()]) for row in rows])
    torch.testing.assert_close(learner.log_probs([row.as_group() for row in rows]), alone, rtol=1e-10, atol=1e-10)


def test_an_adapter_learns_rows_and_the_model_stays(model_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    learner, groups = make_learner(model_path, algorithm=Sft(), lora=lora), [row.as_group() for row in made_rows()]
    losses = [learner.train_step(groups)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.01
    assert all("lora" in name for name, _ in learner.weights())


def test_ptx_takes_the_same_rows(model_path: Path, tmp_path: Path) -> None:
    lines = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [9, 8]}]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ptx = {"coefficient": 0.25, "data": data, "sequences_per_step": 2}
    found = make_learner(model_path, ptx=ptx).train_step(make_batch(seed=41))["ptx_loss"]
    rows = [Row(np.array(line["input_ids"], dtype=np.int32), np.array(mask)) for line, mask in zip(
        lines, ([False, False, True, True], [False, True]), strict=True)]  # fmt: skip
    assert found == pytest.approx(of_transformers(load(model_path), rows)[0].item(), rel=1e-7)


# --- Rows -------------------------------------------------------------------------------------------------------------

CHAT = {
    "messages": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "a/2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "b/4"},
    ]
}


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["ChatML", "marked by generation"])
@pytest.mark.parametrize(
    ("turns", "expected"), [("all", ["a/2<|im_end|>", "b/4<|im_end|>"]), ("last", ["b/4<|im_end|>"])]
)
def test_the_assistants_turns_of_a_chat_are_in_the_loss(
    tmp_path: Path, template: str, turns: str, expected: list[str]
) -> None:
    (row,) = read(save_tokenizer(tmp_path, template), CHAT, assistant_turns=turns)
    assert in_loss(tmp_path, row) == expected
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).decode(row.token_ids).startswith("<|im_start|>user\n1+1")


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, THINKING)
    with pytest.raises(LearnerError, match=r"rows.jsonl, line 1: messages\[1\]: the model's chat template renders"):
        read(tmp_path, CHAT)
    (row,) = read(tmp_path, CHAT, assistant_turns="last")
    assert in_loss(tmp_path, row) == ["b/4<|im_end|>"]


def test_texts_and_completions_end_with_the_end_token(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    rows = {"prompt": "1+1=", "completion": "2"}, {"text": "abc"}
    assert [in_loss(tmp_path, row) for row in read(tmp_path, *rows)] == [["2<|end|>"], ["bc<|end|>"]]
    assert [in_loss(tmp_path, row) for row in read(tmp_path, *rows, append_eos=False)] == [["2"], ["bc"]]


def test_the_runs_system_prompt_begins_a_chat_without_one(tmp_path: Path) -> None:
    reader = RowReader(save_tokenizer(tmp_path, CHATML), 200, None, RunSection(system_prompt="be brief"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(CHAT))
    (row,) = reader.read(tmp_path / "rows.jsonl", "sft.data")
    text = PreTrainedTokenizerFast.from_pretrained(tmp_path).decode(row.token_ids)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ('{"text": "a", "text": "b"}', 'got "text" twice; allowed: each key once'),
        ("[1]", "a row is a JSON object"),
        ({"prompt": "a"}, "a row has one of messages, prompt with completion, text and input_ids; got only prompt"),
        ({"text": "a", "messages": []}, "got messages and text"),
        ({"completion": "a"}, "completion without prompt"),
        ({"text": ["a"]}, "text must be text, got \"['a']\"; a chat is under messages"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must be input_ids with -100"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "labels must be input_ids with -100"),
        ({"input_ids": [1, 2.5]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1, 200]}, "input_ids has ids from 1 to 200; this model's are 0 to 199"),
        ({"input_ids": [1]}, "input_ids has 1 tokens; a row has at least two"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "input_ids has no token in the loss"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages needs a turn of the assistant"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages has the role 'bot'; allowed: system, "),
        ({"messages": [3]}, "messages must be a list of"),
        ({"messages": [{"from": "human", "value": "a"}]}, "messages[0] has no role and no content, but from, value;"),
        ({"messages": [{"role": "user", "text": "a"}]}, "messages[0] has no content, but role, text; give role and"),
        ({"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": ""}]}, "an empty turn of the assistant"),
        ({"prompt": "a", "completion": ""}, "completion is empty; leave the row out"),
        ({**CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, got '[1]'"),
        (
            {"text": "a", "image": "a.png"},
            'got "image", which the model would not see; allowed: text; leave the column',
        ),
        ({"text": "a" * 40}, "text has 41 tokens; the model reads at most 30"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rows_that_cannot_be_trained_are_refused_by_line(tmp_path: Path, row: Any, message: str) -> None:
    save_tokenizer(tmp_path, CHATML)
    with pytest.raises(LearnerError) as refusal:
        read(tmp_path, {"text": "good", "images": []}, row, longest=30)
    assert "rows.jsonl, line 2: " in str(refusal.value) and message in str(refusal.value)


def test_a_model_without_chat_template_is_refused_for_chats(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="has no chat template; set model.chat_template, or give"):
        read(save_tokenizer(tmp_path), CHAT)


@pytest.mark.parametrize(("policy", "left"), [("drop", [4]), ("truncate", [4, 3])])
def test_long_rows_are_dropped_or_cut_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, left: list[int]
) -> None:
    rows = {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1] * 9, "labels": [-100] * 2 + [1] + [-100] * 6}
    gone = {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}  # nothing of its loss is left when it is cut
    caplog.set_level(logging.WARNING)
    found = read(tmp_path, *rows, gone, longest=4, long_rows=policy)
    assert [int(np.flatnonzero(row.in_loss)[-1]) + 1 for row in found] == left
    assert [record.message for record in caplog.records][0].startswith(
        f"sft.data: {2 if policy == 'drop' else 1} rows of more than 4 tokens are left out, the first in line"
    )


def test_each_pass_has_each_row_once_in_an_order_of_its_own() -> None:
    every = [place for step in range(5) for place in rows_of_step(step, 4, 10, seed=3)]
    assert sorted(every[:10]) == sorted(every[10:]) == list(range(10)) and every[:10] != every[10:]
    assert list(rows_of_step(3, 4, 10, seed=3)) == every[12:16]
    assert list(rows_of_step(1, 4, 10, seed=3, shuffle=False)) == [4, 5, 6, 7]
