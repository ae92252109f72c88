"""The language-model loss beside the policy's."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from learner_helpers import assert_near, gradients, make_batch, make_learner
from reference import load

from quartet_trainer.learner import LearnerError

TEXTS = [[1, 2, 3, 4, 5, 6], [9, 8], [7, 7, 7, 1]]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("tokens", [8192, 1])
def test_ptx_loss_and_gradient_equal_reference(model_path: Path, tmp_path: Path, tokens: int) -> None:
    data = write(tmp_path / "texts.jsonl", [{"input_ids": text} for text in TEXTS])
    ptx = {"coefficient": 0.25, "data": data, "sequences_per_step": 3}
    groups = make_batch(seed=41)
    with_texts = make_learner(model_path, ptx=ptx, micro_batch_tokens=tokens)
    policy = gradients(make_learner(model_path), groups)
    model = load(model_path)
    total = torch.zeros((), dtype=torch.float64)
    for text in TEXTS:
        log_probs = torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0], -1)
        total = total - sum(log_probs[place, token] for place, token in enumerate(text[1:]))
    loss = total / 9
    loss.backward()
    expected = {name: 0.75 * policy[name] + 0.25 * parameter.grad for name, parameter in model.named_parameters()}
    assert_near(gradients(with_texts, groups), expected, rtol=1e-6, atol=1e-7)
    assert with_texts.train_step(groups)["ptx_loss"] == pytest.approx(loss.item(), abs=1e-7)


def test_the_reference_model_does_not_read_the_texts(model_path: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "texts.jsonl", [{"input_ids": text} for text in TEXTS])
    learner = make_learner(model_path, ptx={"coefficient": 0.25, "data": data}, kl_coefficient=0.1)
    learner._plugin.reference_log_probs = reference = Mock(wraps=learner._plugin.reference_log_probs)
    micro_batches = learner.train_step(make_batch(seed=41))["micro_batches"]
    assert reference.call_count == micro_batches > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"input_ids": [1, 64]}, "line 1: input_ids has ids from 1 to 64; this model's are 0 to 63"),
        ({"input_ids": [1] * 200}, "line 1: input_ids has 200 tokens; the model reads at most 128"),
    ],
)
def test_texts_that_cannot_be_read(model_path: Path, tmp_path: Path, line: dict, message: str) -> None:
    ptx = {"coefficient": 0.25, "data": write(tmp_path / "texts.jsonl", [line])}
    with pytest.raises(LearnerError, match=message):
        make_learner(model_path, ptx=ptx)
