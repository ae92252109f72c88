"""The learner against a plain PyTorch loop that shares no code with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from learner_helpers import Run, gradients, make_batch, make_model, settings

from quartet_trainer.learner import create_learner
from quartet_trainer.learner.metrics import CRITIC, METRICS

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "grpo as in its paper": (
        {"aggregation": "sequence-mean-token-mean"},
        {"aggregation": "sequence-mean-token-mean"},
    ),
    "dr_grpo": ({"algorithm": "dr_grpo"}, {"algorithm": "dr_grpo", "aggregation": "constant"}),
    "rloo": ({"algorithm": "rloo"}, {"algorithm": "rloo", "aggregation": "sequence-mean-token-sum"}),
    "dapo": ({"algorithm": "dapo"}, {"algorithm": "dapo", "high": 0.28, "mask_truncated": True}),
    "narrow clip": ({"clip_low": 0.05, "clip_high": 0.5}, {"low": 0.05, "high": 0.5}),
    "recomputed old log-probs": (
        {"old_log_probs": "recompute", "tis_cap": 0.0},
        {"recompute": True},
    ),
    "truncated importance sampling": (
        {"old_log_probs": "recompute", "tis_cap": 1.5},
        {"recompute": True, "tis_cap": 1.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(model_path: Path, case: str) -> None:
    ours, theirs = CASES[case]
    groups = make_batch(seed=5)
    model = plain_loop.load(model_path, torch.float64)
    loss = plain_loop.plain_loss(model, groups, **theirs)
    loss.backward()

    learner = create_learner(settings(**ours), model_path, Run())
    found = gradients(learner, groups)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-9)
    assert learner.train_step(groups)["loss"] == pytest.approx(loss.item(), abs=1e-9)


def test_kl_to_the_first_weights(model_path: Path) -> None:
    """After a step the policy has left its reference, which stays."""
    groups = make_batch(seed=6)
    learner = create_learner(settings(kl_coefficient=0.3), model_path, Run())
    first = learner.train_step(groups)
    assert first["kl"] == pytest.approx(0.0, abs=1e-12)
    model, reference = (plain_loop.load(model_path, torch.float64) for _ in range(2))
    model.load_state_dict(learner._causal_lm.state_dict())
    loss = plain_loop.plain_loss(model, groups, reference=reference, beta=0.3)
    loss.backward()
    found = gradients(learner, groups)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-9)
    second = learner.train_step(groups)
    assert second["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert second["kl"] > 0
    assert second["completions_skipped"] == 0  # with a KL, completions without advantage move the gradient too


def test_the_same_curve_for_twenty_steps(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", seed=1)
    batches = [make_batch(seed=100 + step, longest=12) for step in range(20)]
    expected = plain_loop.plain_training(path, batches, learning_rate=3e-3)
    learner = create_learner(settings(precision="fp32", learning_rate=3e-3, max_grad_norm=1.0), path, Run())
    found = [learner.train_step(groups)["loss"] for groups in batches]
    assert found == pytest.approx(expected, abs=1e-4)
    assert learner.step == 20


def test_every_metric_has_a_documented_name(model_path: Path) -> None:
    plain = create_learner(settings(), model_path, Run()).train_step(make_batch())
    with_kl = create_learner(settings(kl_coefficient=0.1), model_path, Run()).train_step(make_batch())
    assert plain.keys() == METRICS.keys() - {"kl", "ptx_loss", *CRITIC}
    assert with_kl.keys() == plain.keys() | {"kl"}
    assert all(isinstance(value, float) for value in with_kl.values())
