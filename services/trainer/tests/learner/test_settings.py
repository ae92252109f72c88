"""The learner's keys, its schedule, and the sentences for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import Run, Sampling, make_batch, make_model, settings
from pydantic import ValidationError

from quartet_trainer.learner import LearnerError, LearnerSettings, create_learner
from quartet_trainer.learner.model_folder import ModelFolderError, check_model_folder
from quartet_trainer.learner.optimizer import LearningRate, create_optimizer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"plugin": "gemini"},
            "'fp32' is not possible with plugin = \"gemini\", which computes in bf16; set precision",
        ),
        (
            {"lora": {"r": 4}, "plugin": "gemini", "precision": "bf16"},
            '"low_level_zero" or "hybrid_parallel", not \'gemini\'',
        ),
        ({"lora": {"r": 4}, "plugin": "torch_fsdp"}, '"low_level_zero" or "hybrid_parallel", not \'torch_fsdp\''),
        ({"plugin": "deepspeed"}, "'torch_ddp', 'torch_fsdp', 'low_level_zero', 'gemini' or 'hybrid_parallel'"),
        ({"tp_size": 2}, "tp_size: 2 needs plugin = \"hybrid_parallel\", not 'torch_ddp'"),
        ({"zero_stage": 2}, 'zero_stage: 2 needs plugin = "low_level_zero" or "hybrid_parallel", not \'torch_ddp\''),
        ({"zero_stage": 2, "plugin": "hybrid_parallel", "pp_size": 2}, "with pp_size 2 only 1 is possible"),
        ({"sequence_parallel": "all_to_all"}, "sp_size: 1 with sequence_parallel 'all_to_all'; above 1 with"),
        ({"sp_size": 2}, "sp_size: 2 with sequence_parallel None; above 1 with"),
        (
            {"sequence_parallel": "split_gather", "tp_size": 2, "plugin": "hybrid_parallel", "zero_stage": 2},
            "'split_gather' exchanges the norms' gradients once a step; with it zero_stage can be 1",
        ),
        (
            {"sequence_parallel": "split_gather", "plugin": "hybrid_parallel"},
            "shares sequences among the tp_size ranks, and tp_size is 1",
        ),
        ({"sequence_parallel": "ring", "tp_size": 2, "plugin": "hybrid_parallel"}, "'ring' gives wrong gradients"),
        ({"sequence_parallel": "ring_attn", "plugin": "hybrid_parallel"}, "'ring_attn' is not built"),
        (
            {"sequence_parallel": "all_to_all", "sp_size": 2, "plugin": "low_level_zero"},
            "sequence_parallel: 'all_to_all' needs plugin = \"hybrid_parallel\", not 'low_level_zero'",
        ),
        ({"mini_batches": 0}, "mini_batches"),
        ({"lora": {"r": 4}, "plugin": "hybrid_parallel", "tp_size": 2}, "with adapters tp_size must be 1, not 2"),
        ({"adam_betas": (0.9, 1.0)}, r"each must be in \[0, 1\), got \[0.9, 1.0\]"),
        ({"schedule_steps": 10, "warmup_steps": 10}, r"warmup_steps \(10\) must be smaller than schedule_steps \(10\)"),
        ({"correction": "icepop"}, 'it needs old_log_probs = "recompute"'),
        ({"correction": "icepop", "algorithm": "gspo", "old_log_probs": "rollout"}, 'it needs old_log_probs = "reco'),
        ({"algorithm": "dpo"}, "'grpo', 'dr_grpo', 'dapo', 'rloo'"),
        ({"learning_rat": 1.0}, "learning_rat"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSettings(**values)


def test_the_algorithm_chooses_what_ratios_are_to_unless_it_is_written() -> None:
    assert LearnerSettings().ratio_to == LearnerSettings(algorithm="ppo").ratio_to == "rollout"
    assert LearnerSettings(algorithm="gspo", correction="icepop").ratio_to == "recompute"
    assert LearnerSettings(algorithm="gspo", old_log_probs="rollout").ratio_to == "rollout"
    assert LearnerSettings(old_log_probs="recompute").ratio_to == "recompute"


def test_every_key_is_described() -> None:
    assert all(field.description for field in LearnerSettings.model_fields.values())


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, quartet_trainer.learner.base, quartet_trainer.learner.settings, quartet_trainer.checkpoints, "
        "quartet_trainer.learner.model_folder; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def rates(max_steps: int = 0, **values: Any) -> list[float]:
    schedule = LearningRate(LearnerSettings(learning_rate=1.0, **values), max_steps)
    return [schedule(step) for step in range(13)]


def test_constant_rate_after_a_linear_warmup() -> None:
    assert rates() == [1.0] * 13
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_to_its_floor_and_never_climbs_again() -> None:
    found = rates(max_steps=10, schedule="cosine", warmup_steps=2, min_learning_rate_ratio=0.1)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[6] == pytest.approx(0.55)  # half-way between 1 and 0.1
    assert found[10:] == pytest.approx([0.1] * 3)
    assert all(later <= earlier for earlier, later in zip(found[2:], found[3:], strict=False))
    assert rates(max_steps=10, schedule="cosine", schedule_steps=5)[5] == pytest.approx(0.1)


def test_a_cosine_needs_an_end() -> None:
    with pytest.raises(LearnerError, match=r"set trainer\.schedule_steps or run\.max_steps"):
        LearningRate(LearnerSettings(schedule="cosine"), 0)


def test_weight_decay_spares_norms_and_biases(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    matrices, vectors = create_optimizer(model, LearnerSettings(weight_decay=0.1)).param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0.0
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_dr_grpo_divides_by_the_runs_longest_completion(model_path: Path) -> None:
    groups = make_batch()
    losses = [
        create_learner(settings(algorithm="dr_grpo"), model_path, Run(sampling=Sampling(n))).train_step(groups)["loss"]
        for n in (16, 32)
    ]
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-9)


def test_a_gradient_that_is_not_finite_leaves_the_weights(model_path: Path) -> None:
    learner = create_learner(settings(precision="fp32"), model_path, Run())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    groups = make_batch()
    extreme = np.array([1e38, -1e38, 1e38, -1e38], dtype=np.float32)
    for group in groups:
        group.rewards.data = extreme.tobytes()
    reckless = create_learner(settings(precision="fp32", algorithm="dr_grpo", aggregation="sequence-mean-token-sum"),
                              model_path, Run())  # fmt: skip
    metrics = reckless.train_step(groups)
    assert metrics["update_skipped"] == 1.0
    assert reckless.step == 1
    for name, tensor in reckless.weights():
        assert torch.equal(tensor, before[name]), name
    assert reckless.train_step(make_batch())["update_skipped"] == 0.0


def test_model_folders_that_cannot_be_trained_from(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is no folder"):
        check_model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        check_model_folder(tmp_path)
    path = make_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert check_model_folder(path) == config

    def rewrite(values: dict[str, Any]) -> None:
        (path / "config.json").write_text(json.dumps(values), encoding="utf-8")

    rewrite({**config, "rope_parameters": {"rope_theta": 1e6}})
    with pytest.raises(ModelFolderError, match=r"was written by transformers 5; the trainer reads the 4\.51 form"):
        check_model_folder(path)
    rewrite({"model_type": "gemma3", "text_config": config})
    with pytest.raises(ModelFolderError, match=r"of a model of several parts \(gemma3\); the trainer takes"):
        check_model_folder(path)
    rewrite({**config, "torch_dtype": "int8"})
    with pytest.raises(ModelFolderError, match="torch_dtype is 'int8'; allowed: float32, bfloat16, float16"):
        check_model_folder(path)
    rewrite(config)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match=r"has no model\.safetensors"):
        check_model_folder(path)
