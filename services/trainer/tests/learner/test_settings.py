"""The learner's keys, the sentences for what cannot be, and `trainer.preset`: another program's defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from learner_helpers import Run, make_batch, make_model, settings
from pydantic import ValidationError

from quartet_common.config import ConfigError, load_config
from quartet_common.presets import TRAINER_PRESETS, PresetName
from quartet_trainer.config import TrainerSection
from quartet_trainer.learner import LearnerSettings, create_learner
from quartet_trainer.learner.checks import ModelFolderError, check_model_folder
from quartet_trainer.learner.optimizer import create_optimizer
from quartet_trainer.learner.plugins.base import Phases
from quartet_trainer.preflight import preflight

HEAD: dict[str, Any] = {"algorithm": "ppo", "critic": {"form": "head"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"plugin": "gemini", "precision": "fp32"},
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
        ({"sp_size": 2, "plugin": "low_level_zero"}, 'sp_size: 2 needs plugin = "hybrid_parallel", not \'low_level_z'),
        (
            {"sequence_parallel": "ring", "sp_size": 2, "plugin": "hybrid_parallel"},
            "got 'ring'; the one mode is all",
        ),
        ({"mini_batches": 0}, "mini_batches"),
        (
            {"offload_optimizer": True, "plugin": "hybrid_parallel", "tp_size": 2},
            "\"hybrid_parallel\" with zero_stage, not 'hybrid_parallel' alone",
        ),
        ({"lora": {"r": 4}, "plugin": "hybrid_parallel", "tp_size": 2}, "with adapters tp_size must be 1, not 2"),
        ({"adam_betas": (0.9, 1.0)}, r"each must be in \[0, 1\), got \[0.9, 1.0\]"),
        ({"schedule_steps": 10, "warmup_steps": 10}, r"warmup_steps \(10\) must be smaller than schedule_steps \(10\)"),
        ({"correction": "icepop"}, 'it needs old_log_probs = "recompute"'),
        ({"correction": "icepop", "algorithm": "gspo", "old_log_probs": "rollout"}, 'it needs old_log_probs = "reco'),
        ({"algorithm": "dpo"}, "'grpo', 'dr_grpo', 'dapo', 'rloo'"),
        ({"learning_rat": 1.0}, "learning_rat"),
        (
            {**HEAD, "plugin": "hybrid_parallel"},
            "not 'hybrid_parallel'",
        ),
        ({**HEAD, "plugin": "torch_fsdp"}, 'needs plugin = "torch_ddp" or "low_level_zero", not'),
        ({**HEAD, "critic": {"form": "head", "model": "somewhere"}}, "a head has no model but the policy"),
        ({**HEAD, "critic": {"form": "shared"}}, "'separate' or 'head'"),
        ({**HEAD, "critic": {"form": "head", "value_coefficient": 0}}, "greater than 0"),
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


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, quartet_trainer.learner.base, quartet_trainer.learner_settings, quartet_trainer.checkpoints, "
        "quartet_trainer.learner.checks; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_weight_decay_spares_norms_and_biases(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    matrices, vectors = create_optimizer(model, LearnerSettings(weight_decay=0.1)).param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0.0
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_a_gradient_that_is_not_finite_leaves_the_weights(model_path: Path) -> None:
    values = {"precision": "fp32", "algorithm": "dr_grpo", "aggregation": "sequence-mean-token-sum"}
    learner = create_learner(settings(**values), model_path, Run())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    groups = make_batch()
    for group in groups:
        group.rewards.data = np.array([1e38, -1e38, 1e38, -1e38], dtype=np.float32).tobytes()
    assert learner.train_step(groups)["update_skipped"] == 1.0
    assert learner.step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert learner.train_step(make_batch())["update_skipped"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3", "text_config": {}}, r"of a model of several parts \(gemma3\); the trainer takes"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed: float32, bfloat16, float16"),
    ],
)
def test_models_that_cannot_be_trained_from(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = make_model(tmp_path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    assert check_model_folder(tmp_path) == config
    file.write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=message):
        check_model_folder(tmp_path)


def test_precision_that_nobody_wrote() -> None:
    plugins = ("torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel")
    found = {
        (plugin, device): LearnerSettings(plugin=plugin).on(device).precision
        for plugin in plugins
        for device in ("cuda", "cpu")
    }
    half = {(plugin, "cuda") for plugin in plugins} | {("gemini", "cpu")}
    assert found == {key: "bf16" if key in half else "fp32" for key in found}
    written = LearnerSettings(precision="fp32")
    assert written.on("cuda") is written


@pytest.mark.timeout(300)  # another interpreter imports ColossalAI
def test_importing_colossalai_leaves_cudas_queues_as_they_were() -> None:
    code = """
import os
from quartet_trainer.learner import colossalai_patches
for before in (None, "8"):
    os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": before} if before else {})
    colossalai_patches.apply()
    print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
"""
    given = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    answer = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["None", "8"]


def test_phases_are_timed_by_events_and_only_the_end_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")
            self.at = 1000.0 * 2 ** said.count("record")

        def elapsed_time(self, end: Event) -> float:
            assert said[-1] == "wait"
            return end.at - self.at

        def synchronize(self) -> None:
            said.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(torch.device("cuda"))
    for phase in ("forward", "backward", "forward"):
        phases.begin(phase)
    assert phases.end() == {"forward": 2.0 + 8.0, "backward": 4.0}
    assert said == ["record"] * 4 + ["wait"]


PUBLISHED: dict[str, dict[str, Any]] = {
    "colossalchat-grpo": {"algorithm": "grpo", "clip": (0.2, 0.2), "kl": (0.01, "k3", "loss"), "sequences": True},
    "colossalchat-dapo": {"algorithm": "dapo", "clip": (0.2, 0.28), "kl": (0.0, None, None), "sequences": False},
    "colossalchat-reinforce-ppb": {
        "algorithm": "reinforce_pp_baseline",
        "clip": (0.2, 0.2),
        "kl": (0.01, "k3", "reward"),
        "sequences": True,
    },
    "colossalchat-rloo": {"algorithm": "rloo", "clip": (0.2, 0.2), "kl": (0.01, "k3", "loss"), "sequences": True},
}
"""What its source says, put down apart from the table."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_what_colossalchat_trains_with(preset: str) -> None:
    found, expected = LearnerSettings(preset=preset), PUBLISHED[preset]
    assert found.algorithm == expected["algorithm"]
    assert (found.clip_low, found.clip_high) == expected["clip"]
    assert (found.kl_coefficient, found.kl_estimator, found.kl_in) == expected["kl"]
    assert found.aggregation == ("sequence-mean-token-mean" if expected["sequences"] else "token-mean")
    assert (found.learning_rate, found.weight_decay, found.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (found.schedule, found.warmup_steps, found.min_learning_rate_ratio) == ("cosine", 0, 0.1)
    assert (found.precision, found.gradient_checkpointing, found.std_epsilon) == ("bf16", True, 1e-4)
    assert (found.ratio_to, found.adam_betas) == ("rollout", (0.9, 0.999))
    assert found.model_copy(update={"preset": None}) == LearnerSettings(**TRAINER_PRESETS[preset])
    assert set(TRAINER_PRESETS) == set(get_args(PresetName)) == set(PUBLISHED)


def test_what_is_written_wins_wherever_it_stands(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[trainer]\nclip_high = 0.5\npreset = "colossalchat-dapo"\nschedule = "constant"\n')
    section = load_config("trainer", TrainerSection, run_file, ["trainer.learning_rate=0.5"]).section
    assert (section.clip_high, section.schedule, section.learning_rate) == (0.5, "constant", 0.5)
    assert (section.algorithm, section.weight_decay, section.samples_dynamically) == ("dapo", 0.01, True)
    assert load_config("trainer", TrainerSection, run_file, ["trainer.preset=colossalchat-rloo"]).section.algorithm == (
        "rloo"
    )


@pytest.mark.parametrize("preset", ["colossalchat", ["colossalchat-grpo"]])
def test_another_name_is_refused_with_the_list(preset: Any) -> None:
    with pytest.raises(ValidationError, match=r"preset\n.*'colossalchat-grpo', .* or 'colossalchat-rloo'"):
        LearnerSettings(preset=preset)


def test_its_cosine_without_an_end_is_refused_before_the_start(model_path: Path, tmp_path: Path) -> None:
    words = [f"model.path={model_path}", f"run.folder={tmp_path}", "trainer.preset=colossalchat-grpo"]
    with pytest.raises(ConfigError, match=r"a cosine over 0 steps .* set trainer\.schedule_steps or run\.max_steps"):
        preflight(load_config("trainer", TrainerSection, None, words))
    assert preflight(load_config("trainer", TrainerSection, None, [*words, "run.max_steps=5"]))["algorithm"] == "grpo"
