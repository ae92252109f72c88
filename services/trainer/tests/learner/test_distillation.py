"""On-policy distillation against `reference`: from another model here, and from log-probs that rollouts recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import Run, assert_near, gradients, make_batch, make_learner, make_model
from quartet.v1 import tensor_pb2
from reference import batch_loss, load, own_attention

from quartet_common.tensors import decode_ragged, encode, encode_ragged
from quartet_trainer.batch import ExperienceError

RECOMPUTE = {"old_log_probs": "recompute"}
TAUGHT = Run(teachers={"big": {"address": "127.0.0.1:1"}})
LORA = {"r": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of another depth, with the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher"), initializer_range=0.5, num_hidden_layers=3)


def judged(batch: list[Any]) -> list[Any]:
    """The batch as rollouts with a teacher put it."""
    rng = np.random.default_rng(5)
    for group in batch:
        rows = [rng.normal(-3.0, 1.0, row.size).astype(np.float32) for row in decode_ragged(group.rollout_log_probs)]
        group.teacher_log_probs.CopyFrom(encode_ragged(rows, tensor_pb2.DTYPE_FLOAT32))
    return batch


@pytest.mark.parametrize("served", [False, True], ids=["reference model", "served"])
@pytest.mark.parametrize(
    "values",
    [
        {"distillation": {"coefficient": 1.0}},
        {"distillation": {"coefficient": 0.5, "reward_weight": 2.0}, **RECOMPUTE},
        {"distillation": {"coefficient": 1.0}, "kl_coefficient": 0.3, "algorithm": "rloo"},
        {"distillation": {"coefficient": 1.0, "reward_weight": 1.0}, "algorithm": "ppo"},
    ],
    ids=["alone", "mixed, recomputed", "with a KL", "ppo"],
)
def test_loss_and_gradient_are_those_of_the_reverse_kl(
    model_path: Path, teacher_path: Path, values: dict[str, Any], served: bool
) -> None:
    batch = judged(make_batch(seed=31)) if served else make_batch(seed=31)
    own = {} if served else {"reference": {"model": str(teacher_path)}}
    learner = make_learner(model_path, TAUGHT if served else None, micro_batch_tokens=60, **own, **values)
    model = load(model_path)
    critic = learner._critic._model.unwrap() if learner._critic else None
    reference = load(model_path if served else teacher_path)
    loss, _ = batch_loss(model, batch, values, reference=reference, critic=critic)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_near(gradients(learner, batch), expected, rtol=1e-6, atol=1e-9)
    metrics = learner.train_step(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    assert metrics["completions_skipped"] == 0, "completions of equal rewards teach too"


def test_teacher_kl_is_the_mean_of_policy_over_teacher(model_path: Path) -> None:
    batch = judged(make_batch(seed=3))
    learner = make_learner(model_path, TAUGHT, distillation={"coefficient": 1.0})
    total, count = 0.0, 0
    for group in batch:
        masks = decode_ragged(group.loss_mask) if group.HasField("loss_mask") else None
        rows = zip(decode_ragged(group.rollout_log_probs), decode_ragged(group.teacher_log_probs), strict=True)
        for index, (own, teacher) in enumerate(rows):
            kept = np.ones(own.size, bool) if masks is None else masks[index].astype(bool)
            total, count = total + float((own - teacher)[kept].sum(dtype=np.float64)), count + int(kept.sum())
    assert learner.train_step(batch)["teacher_kl"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [{}, {"plugin": "torch_fsdp"}, {"plugin": "low_level_zero"}, {"lora": LORA}], ids=str
)
def test_teacher_is_the_same_under_every_plugin_that_takes_one(
    model_path: Path, teacher_path: Path, layout: dict[str, Any]
) -> None:
    """Also with an adapter, whose KL alone is to the base model; and it does not change."""
    values = {"distillation": {"coefficient": 1.0}, "reference": {"model": str(teacher_path)}, "learning_rate": 1e-2}
    plain, other = make_learner(model_path, **values), make_learner(model_path, **values, **layout)
    batch = make_batch(seed=8)
    first = plain.train_step(batch)["teacher_kl"]
    assert other.train_step(batch)["teacher_kl"] == pytest.approx(first, rel=1e-6)
    assert other.train_step(batch)["teacher_kl"] == pytest.approx(first, rel=1e-6), "of the rollout's log-probs"


def drawn(student: Any, prompts: torch.Tensor, seed: int) -> list[Any]:
    """A batch of eight completions of one token for each prompt, sampled from the student."""
    with torch.no_grad(), own_attention(student):
        every = student(input_ids=prompts).logits[:, -1].log_softmax(-1)
    tokens = torch.multinomial(every.exp(), 8, replacement=True, generator=torch.Generator().manual_seed(seed))
    batch = make_batch(seed=seed, groups=len(prompts), size=8, longest=1)
    for group, prompt, chosen, log_probs in zip(batch, prompts, tokens, every.gather(-1, tokens), strict=True):
        group.prompt_token_ids.CopyFrom(encode(prompt.numpy().astype(np.int32)))
        rows = chosen.numpy().astype(np.int32)[:, None], log_probs.numpy().astype(np.float32)[:, None]
        group.completion_token_ids.CopyFrom(encode_ragged(list(rows[0]), tensor_pb2.DTYPE_INT32))
        group.rollout_log_probs.CopyFrom(encode_ragged(list(rows[1]), tensor_pb2.DTYPE_FLOAT32))
        group.temperatures.CopyFrom(encode(np.ones(8, np.float32)))
        group.ClearField("loss_mask")
    return batch


def test_student_comes_nearer_to_its_teacher(model_path: Path, teacher_path: Path) -> None:
    """By the reverse KL over the whole vocabulary, after the prompts that it is trained on."""
    values = {"reference": {"model": str(teacher_path)}, "distillation": {"coefficient": 1.0}, "learning_rate": 3e-3}
    learner, teacher = make_learner(model_path, **values), load(teacher_path)
    student, prompts = learner._causal_lm, torch.arange(48).reshape(12, 4)

    def distance() -> float:
        with torch.no_grad(), own_attention(student):
            own, theirs = (model(input_ids=prompts).logits[:, -1].log_softmax(-1) for model in (student, teacher))
        return float((own.exp() * (own - theirs)).sum(-1).mean())

    before = distance()
    for step in range(30):
        learner.train_step(drawn(student, prompts, step))
    assert distance() < before / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: group.ClearField("teacher_log_probs"), "teacher_log_probs is missing; with .run.teachers."),
        (lambda group: group.teacher_log_probs.lengths.pop(), "teacher_log_probs"),
        (lambda group: setattr(group.teacher_log_probs, "data", b"\xff" * len(group.teacher_log_probs.data)), "finite"),
    ],
    ids=["missing", "a row too few", "not finite"],
)
def test_group_without_usable_log_probs_of_the_teacher_is_refused(model_path: Path, change: Any, message: str) -> None:
    learner = make_learner(model_path, TAUGHT, distillation={"coefficient": 1.0})
    (group,) = judged(make_batch(seed=1, groups=1))
    learner.check_group(group)
    change(group)
    with pytest.raises(ExperienceError, match=message):
        learner.check_group(group)
