"""A reference model that takes the policy's weights every few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from learner_helpers import assert_near, comparable, make_batch, make_learner
from ranks import run_ranks
from safetensors.torch import load_file

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


SPREAD: dict[str, dict[str, Any]] = {
    "fsdp": PLUGINS["fsdp"],
    "zero 2": {**PLUGINS["zero"], "zero_stage": 2},
    "tp2-dp2": {**PLUGINS["hybrid"], "tp_size": 2},
    "pp2-dp2, zero 1": {**PLUGINS["hybrid"], "pp_size": 2, "zero_stage": 1},
}


@pytest.mark.timeout(600)
def test_ranks_spread_the_reference_like_the_policy(model_path: Path, tmp_path: Path) -> None:
    """Three steps, and two more from the checkpoint of another layout, beside one process."""
    batches = [make_batch(seed=seed, groups=5, size=3) for seed in (20, 21, 22)]
    values = {**SYNC, "learning_rate": 1e-3, "micro_batch_tokens": 60}
    jobs: list[dict[str, Any]] = []
    before = next(iter(SPREAD))
    for name, layout in SPREAD.items():
        job = {"model": str(model_path), "settings": {**values, **layout}, "export": False}
        jobs.append({**job, "name": name, "resume": None, "steps": 3})
        jobs.append({**job, "name": f"{name}, resumed", "resume": before, "steps": 2})
        before = name
    run_ranks(tmp_path, 4, jobs, batches)
    alone = make_learner(model_path, **values)
    first = [alone.train_step(groups)["kl"] for groups in batches]
    alone.snapshot(tmp_path / "alone", {})()
    then = [alone.train_step(groups)["kl"] for groups in batches[:2]]
    for name in SPREAD:
        for job, expected in ((name, first), (f"{name}, resumed", then)):
            metrics = json.loads((tmp_path / job / "seen-0.json").read_text())["metrics"]
            assert [step["kl"] for step in metrics] == pytest.approx(expected, rel=1e-4, abs=1e-9), job
        files = (tmp_path / name / "checkpoint" / "reference").glob("*.safetensors")
        saved = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert_near(saved, load_file(tmp_path / "alone" / "reference" / "model.safetensors"), rtol=1e-4, atol=1e-6)
