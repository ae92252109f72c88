"""A reference model that takes the policy's weights every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learner_helpers import assert_near, comparable, make_batch, make_learner

PLUGINS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"plugin": "torch_fsdp"},
    "zero": {"plugin": "low_level_zero"},
    "hybrid": {"plugin": "hybrid_parallel"},
    "gemini": {"plugin": "gemini", "precision": "bf16"},
}
SYNC = {"kl_coefficient": 0.5, "learning_rate": 1e-2, "reference_sync_steps": 2}


@pytest.mark.parametrize("layout", PLUGINS)
def test_kl_is_to_the_policy_of_the_last_multiple(model_path: Path, layout: str) -> None:
    """The KL in the loss is 0 in the step after each copy, and in no other."""
    learner = make_learner(model_path, **SYNC, **PLUGINS[layout])
    kls = [learner.train_step(make_batch(seed=step))["kl"] for step in range(6)]
    assert [kl < 1e-12 for kl in kls] == [True, False] * 3, kls


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_run_that_goes_on_has_the_same_reference(model_path: Path, tmp_path: Path, kl_in: str) -> None:
    """From a checkpoint before the first copy, and from one between two, also by another plugin; ZeRO's optimizer has
    float32 weights."""
    unbroken = make_learner(model_path, **SYNC, kl_in=kl_in)
    expected = []
    for step in range(6):
        if step in (1, 3):
            unbroken.snapshot(tmp_path / f"checkpoint-{step}", {})()
        expected.append(comparable(unbroken.train_step(make_batch(seed=step))))
    assert not (tmp_path / "checkpoint-1" / "reference").exists()
    for begin, layout, near in ((1, "ddp", 0.0), (3, "ddp", 0.0), (3, "fsdp", 1e-7), (3, "zero", 1e-4)):
        resumed = make_learner(model_path, **SYNC, kl_in=kl_in, **PLUGINS[layout])
        resumed.load(tmp_path / f"checkpoint-{begin}")
        again = resumed.snapshot(tmp_path / "again", {})
        for step in range(begin, 6):
            found = comparable(resumed.train_step(make_batch(seed=step)))
            assert found == pytest.approx(expected[step], rel=near, abs=near), (layout, step)
        assert_near(dict(resumed.weights()), dict(unbroken.weights()), rtol=near, atol=near)
        again()
        assert (tmp_path / "again" / "reference").exists() == (begin == 3)
