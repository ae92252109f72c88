"""Gemini, which computes in bf16 alone; on several ranks: `test_plugins`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from learner_helpers import Run, make_batch, settings

from quartet_trainer.learner import create_learner
from quartet_trainer.learner import model as policy_module

GEMINI = {"plugin": "gemini", "precision": "bf16"}


def test_long_batches_are_computed_a_chunk_at_a_time(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_batch(seed=71)
    at_once = create_learner(settings(**GEMINI), model_path, Run()).train_step(groups)
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 64 * 7)
    chunked = create_learner(settings(**GEMINI), model_path, Run()).train_step(groups)
    for name in ("loss", "grad_norm", "entropy"):
        assert chunked[name] == pytest.approx(at_once[name], rel=0.02), name


def test_a_step_that_is_not_taken_leaves_no_gradient(model_path: Path) -> None:
    learner, other = (create_learner(settings(**GEMINI, algorithm="dapo"), model_path, Run()) for _ in range(2))
    usual, learner._algorithm = learner._algorithm, replace(learner._algorithm, max_mean_ratio=1e-6)
    assert learner.train_step(make_batch(seed=72))["update_skipped"] == 1.0
    learner._algorithm = usual
    seen, expected = (one.train_step(make_batch(seed=71)) for one in (learner, other))
    assert (seen["grad_norm"], seen["loss"]) == pytest.approx((expected["grad_norm"], expected["loss"]), rel=1e-9)
