"""Loss and gradient do not depend on how a batch is cut: into micro-batches, into ranks, or by what is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import Run, gradients, make_batch, make_model, settings

from quartet_trainer.learner import create_learner
from quartet_trainer.learner import policy as policy_module

HERE = Path(__file__).parent
CUT_DEPENDENT = ("seconds", "micro_batches", "forward_tokens", "padding_ratio", "shared_prompt_tokens")


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not any(part in name for part in CUT_DEPENDENT)}


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]
)
def test_micro_batches(model_path: Path, aggregation: str) -> None:
    groups = make_batch(seed=11, groups=6)
    whole = create_learner(settings(aggregation=aggregation, micro_batch_tokens=100_000), model_path, Run())
    expected, expected_metrics = gradients(whole, groups), whole.train_step(groups)
    assert expected_metrics["micro_batches"] == 1
    for tokens in (1, 40, 150):
        cut = create_learner(settings(aggregation=aggregation, micro_batch_tokens=tokens), model_path, Run())
        assert_same_gradient(gradients(cut, groups), expected)
        metrics = cut.train_step(groups)
        assert metrics["micro_batches"] > 1
        assert comparable(metrics) == pytest.approx(comparable(expected_metrics), rel=1e-6, abs=1e-9)


def test_order_of_groups(model_path: Path) -> None:
    groups = make_batch(seed=12)
    learner = create_learner(settings(), model_path, Run())
    assert_same_gradient(gradients(learner, groups[::-1]), gradients(learner, groups))


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "dapo"])
def test_skipping_completions_without_advantage(model_path: Path, algorithm: str) -> None:
    groups = make_batch(seed=13, groups=6)
    everything = create_learner(settings(algorithm=algorithm, skip_zero_advantage=False), model_path, Run())
    skipping = create_learner(settings(algorithm=algorithm, skip_zero_advantage=True), model_path, Run())
    assert_same_gradient(gradients(skipping, groups), gradients(everything, groups))
    full, spared = everything.train_step(groups), skipping.train_step(groups)
    assert full["computed_tokens"] == full["trained_tokens"] == spared["trained_tokens"]
    assert spared["computed_tokens"] < spared["trained_tokens"]
    assert spared["completions_skipped"] >= 4  # one group has equal rewards
    assert spared["loss"] == pytest.approx(full["loss"], abs=1e-9)
    assert spared["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-9)


def test_a_batch_without_any_advantage_is_a_step_with_gradient_zero(model_path: Path) -> None:
    """AdamW moves on by its momentum, exactly as it would had everything been computed."""
    learners = [create_learner(settings(skip_zero_advantage=skip), model_path, Run()) for skip in (True, False)]
    flat = make_batch(seed=14)
    for group in flat:
        group.rewards.data = bytes(len(group.rewards.data))
    for learner in learners:
        learner.train_step(make_batch(seed=15))
        before = {name: tensor.clone() for name, tensor in learner.weights()}
        metrics = learner.train_step(flat)
        assert metrics["grad_norm"] == metrics["loss"] == 0.0
        assert any((tensor != before[name]).any() for name, tensor in learner.weights())
    for (name, skipped), (_, computed) in zip(*(learner.weights() for learner in learners), strict=True):
        torch.testing.assert_close(skipped, computed, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("values", [{"gradient_checkpointing": True}, {"kl_coefficient": 0.2}])
def test_options_that_change_no_gradient_on_the_first_step(model_path: Path, values: dict[str, Any]) -> None:
    groups = make_batch(seed=16)
    expected = gradients(create_learner(settings(), model_path, Run()), groups)
    assert_same_gradient(gradients(create_learner(settings(**values), model_path, Run()), groups), expected)


def test_logits_in_chunks(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_batch(seed=17)
    learner = create_learner(settings(), model_path, Run())
    expected = gradients(learner, groups)
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 64 * 5)  # five tokens at a time
    assert_same_gradient(gradients(learner, groups), expected)


def test_bf16_is_near(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", initializer_range=0.05)
    groups = make_batch(seed=18)
    exact = create_learner(settings(), path, Run()).train_step(groups)
    rough = create_learner(settings(precision="bf16"), path, Run()).train_step(groups)
    assert rough["loss"] == pytest.approx(exact["loss"], abs=0.02)
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
