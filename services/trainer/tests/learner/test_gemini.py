"""Gemini computes in bf16 alone: near one process in float64, as near as the other plugins are in bf16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import Run, gradients, make_batch, make_model, settings
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quartet_trainer.learner import create_learner
from quartet_trainer.learner import policy as policy_module

pytestmark = pytest.mark.timeout(600)  # the ranks start once, within the first test

RANKS = 2
GEMINI = {"plugin": "gemini", "precision": "bf16"}
COMMON = {"micro_batch_tokens": 60, "max_grad_norm": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"algorithm": "dapo"},
    "kl": {"kl_coefficient": 0.2, "entropy_coefficient": 0.05, "gradient_checkpointing": True},
    "recompute": {"algorithm": "reinforce_pp", "old_log_probs": "recompute", "kl_coefficient": 0.1},
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "calm", initializer_range=0.05)


@pytest.fixture(scope="module")
def batches() -> list[list]:
    """In the last, one rank has no work of its own."""
    return [make_batch(seed=71, groups=5, size=3), make_batch(seed=72), make_batch(seed=73, groups=1, size=1)]


@pytest.fixture(scope="module")
def done(calm: Path, batches: list[list], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, in one start of the ranks; and one that goes on from FSDP's checkpoint, without moving its weights."""
    out = tmp_path_factory.mktemp("ranks")
    jobs: list[dict[str, Any]] = [
        {"name": name, "settings": {**GEMINI, **values}, "export": True} for name, values in CASES.items()
    ]
    jobs.append({"name": "fsdp", "settings": {"plugin": "torch_fsdp", "precision": "bf16"}})
    jobs.append({"name": "gemini goes on", "settings": {**GEMINI, "learning_rate": 0.0}, "resume": "fsdp"})
    for job in jobs:
        job |= {"model": str(calm), "settings": {**COMMON, **job["settings"]}, "resume": job.get("resume")}
    run_ranks(out, RANKS, jobs, batches)
    return out


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_near_one_process(calm: Path, batches: list[list], done: Path, case: str) -> None:
    alone = create_learner(settings(**COMMON, **CASES[case]), calm, Run())
    before = flat({name: tensor.clone() for name, tensor in alone.weights()})
    expected_gradient = flat(gradients(alone, batches[0]))
    expected = [alone.train_step(groups) for groups in batches]
    gradient = flat(load_file(done / case / "gradient-0.safetensors"))
    assert (gradient - expected_gradient).norm() < 0.02 * expected_gradient.norm()
    weights = load_file(done / case / "weights-0.safetensors")
    moved, expected_move = flat(weights) - before, flat(dict(alone.weights())) - before
    assert torch.nn.functional.cosine_similarity(moved, expected_move, dim=0) > 0.98
    metrics = json.loads((done / case / "seen-0.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.01)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.02)
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    exported = AutoModelForCausalLM.from_pretrained(done / case / "export").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_is_read_by_any_number_of_ranks(calm: Path, done: Path) -> None:
    one = create_learner(settings(**COMMON, **GEMINI), calm, Run())
    assert one.load(done / "dapo" / "checkpoint") == {"saved": "dapo"}
    kept = load_file(done / "dapo" / "checkpoint" / "model" / "model.safetensors")
    found = dict(one._plugin.weights())
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    moments = load_file(done / "dapo" / "checkpoint" / "optimizer.safetensors")
    found = dict(one._plugin.moments())
    assert found.keys() == moments.keys()
    assert {name.partition("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(torch.equal(found[name], tensor) for name, tensor in moments.items())
    assert len(one._plugin.optimizer.chunk16_set) > 1


def test_gemini_goes_on_from_another_plugins_checkpoint(done: Path) -> None:
    """With a learning rate of 0 its weights, in float32, are what it has read."""
    left, found = (load_file(done / name / "weights-0.safetensors") for name in ("fsdp", "gemini goes on"))
    assert all(torch.equal(found[name], tensor) for name, tensor in left.items())
    states = [load_file(done / name / "checkpoint/optimizer.safetensors") for name in ("fsdp", "gemini goes on")]
    assert {int(state["step/model.norm.weight"]) for state in states} == {3, 6}


def test_long_batches_are_computed_a_chunk_at_a_time(
    calm: Path, batches: list[list], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = create_learner(settings(**GEMINI), calm, Run()).train_step(batches[0])
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 64 * 7)
    chunked = create_learner(settings(**GEMINI), calm, Run()).train_step(batches[0])
    for name in ("loss", "grad_norm", "entropy"):
        assert chunked[name] == pytest.approx(at_once[name], rel=0.02), name


def test_a_step_that_is_not_taken_leaves_no_gradient(calm: Path, batches: list[list]) -> None:
    learner, other = (create_learner(settings(**GEMINI, algorithm="dapo"), calm, Run()) for _ in range(2))
    usual, learner._algorithm = learner._algorithm, replace(learner._algorithm, max_mean_ratio=1e-6)
    assert learner.train_step(batches[1])["update_skipped"] == 1.0
    learner._algorithm = usual
    seen, expected = learner.train_step(batches[0]), other.train_step(batches[0])
    assert (seen["grad_norm"], seen["loss"]) == pytest.approx((expected["grad_norm"], expected["loss"]), rel=1e-9)
