"""The learner's keys, the sentences for what cannot be, and `trainer.preset`: another program's defaults."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import make_batch, make_learner
from processes import CUDA_QUEUES, Forked
from pydantic import ValidationError

from quartet_common.config import ConfigError, load_config
from quartet_trainer.algorithms import ClippedRatio, read_algorithm
from quartet_trainer.config import TrainerSection
from quartet_trainer.learner import LearnerSettings
from quartet_trainer.learner.optimizer import create_optimizer

HEAD: dict[str, Any] = {"algorithm": {"name": "ppo", "critic": {"form": "head"}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plugin": "gemini", "precision": "fp32"}, "'fp32' is not possible with plugin = \"gemini\", which computes"),
        ({"lora": {"r": 4}, "plugin": "torch_fsdp"}, '"low_level_zero" or "hybrid_parallel", not \'torch_fsdp\''),
        ({"plugin": "deepspeed"}, "'torch_ddp', 'torch_fsdp', 'low_level_zero', 'gemini' or 'hybrid_parallel'"),
        ({"tp_size": 2}, "tp_size: 2 needs plugin = \"hybrid_parallel\", not 'torch_ddp'"),
        ({"zero_stage": 2, "plugin": "hybrid_parallel", "pp_size": 2}, "with pp_size 2 only 1 is possible"),
        ({"lora": {"r": 4}, "plugin": "hybrid_parallel", "tp_size": 2}, "with adapters tp_size must be 1, not 2"),
        ({"lora": {"r": 4, "target_modules": "q_proj"}}, r'such as \["q_proj", "v_proj"\], or "all-linear"'),
        ({"lora": {"r": 4, "target_modules": []}}, 'or "all-linear"'),
        ({"schedule_steps": 10, "warmup_steps": 10}, r"warmup_steps \(10\) must be smaller than schedule_steps \(10\)"),
        (
            {"algorithm": {"name": "max_rl", "kl_in": "reward"}},
            "max_rl divides by the mean reward, which a KL would make",
        ),
        ({"algorithm": {"name": "dppo", "divergence": "js"}}, "'tv' or 'kl'"),
        ({"reference_sync_steps": 5}, "without a KL there is no reference model; set kl_coefficient above 0"),
        (
            {"reference_sync_steps": 5, "kl_coefficient": 0.1, "lora": {"r": 4}},
            "with adapters the reference is the base model, which does not change; set 0, or lora.r = 0",
        ),
        ({"reference": {"model": "teacher"}}, "got 'teacher', and nothing compares with it; set kl_coefficient or"),
        (
            {"reference": {"model": "teacher"}, "kl_coefficient": 0.1, "reference_sync_steps": 5},
            "reference_sync_steps: with reference.model the reference is a model of its own",
        ),
        (
            {"reference": {"model": "teacher"}, "kl_coefficient": 0.1, "plugin": "gemini"},
            "the policy's own parts; allowed: torch_ddp, low_level_zero, torch_fsdp; or a served teacher",
        ),
        ({"distillation": {"reward_weight": 1}}, "nothing is distilled; set distillation.coefficient above 0"),
        ({"kl_target": 0.1}, "kl_target: it adapts kl_coefficient by factors; set kl_coefficient above 0"),
        ({"kl_coefficient": 0.1, "kl_horizon": 5}, "kl_horizon: without kl_target nothing is adapted"),
        ({"entropy_coefficient_max": 0.1}, "entropy_coefficient_max: without entropy_target nothing is adapted"),
        (
            {"entropy_target": 0.1, "entropy_coefficient": 2},
            "got 2; allowed with entropy_target: at most entropy_coefficient_max, 1",
        ),
        ({"algorithm": {"correction": "icepop"}}, 'it needs old_log_probs = "recompute"'),
        ({**HEAD, "plugin": "torch_fsdp"}, 'needs plugin = "torch_ddp" or "low_level_zero", not'),
        ({"preset": "colossalchat"}, r"preset\n.*'colossalchat-grpo', .* or 'colossalchat-rloo'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSettings(**values)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('modules_to_save = ["lm_head"]', "PEFT's modules_to_save is not here: adapters alone are trained"),
        ('init_lora_weights = "pissa"', "PEFT's init_lora_weights is not here: A is random and B is 0"),
        ('bias = "all"', "PEFT's lora.bias is not here: biases stay fixed; trainer.lora.r = 0 trains the whole model"),
        ('exclude_modules = ["q_proj"]', "PEFT's exclude_modules is trainer.lora.target_modules here"),
        ('target_parameters = ["a"]', "PEFT's target_parameters is trainer.lora.target_modules here"),
        ("use_dora = true", "PEFT's use_dora is not here: adapters are plain LoRA, or rsLoRA with"),
        ("lora_alpha = 8", "PEFT's lora_alpha is trainer.lora.alpha here"),
    ],
)
def test_keys_of_peft_are_refused_with_the_cure(given: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[trainer]\nlora = {{ r = 4, {given} }}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"unknown key trainer.lora.{given.split()[0]} .*: {said}"):
        load_config("trainer", TrainerSection, file, [])


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
    learner = make_learner(model_path, **values)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    groups = make_batch()
    for group in groups:
        group.rewards.data = np.array([1e38, -1e38, 1e38, -1e38], dtype=np.float32).tobytes()
    assert learner.train_step(groups)["update_skipped"] == 1.0
    assert learner.step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert learner.train_step(make_batch())["update_skipped"] == 0.0


@pytest.mark.parametrize(
    ("preset", "published"),
    {  # what its source says, put down apart from the table: algorithm, clip, KL, mean over sequences
        "colossalchat-grpo": ("grpo", 0.2, 0.2, 0.01, "k3", "loss", "sequence-mean-token-mean"),
        "colossalchat-dapo": ("dapo", 0.2, 0.28, 0.0, "k3", "loss", "token-mean"),
        "colossalchat-reinforce-ppb": (
            "reinforce_pp_baseline", 0.2, 0.2, 0.01, "k3", "reward", "sequence-mean-token-mean",
        ),
        "colossalchat-rloo": ("rloo", 0.2, 0.2, 0.01, "k3", "loss", "sequence-mean-token-mean"),
    }.items(),
)  # fmt: skip
def test_a_preset_is_what_colossalchat_trains_with(preset: str, published: tuple[Any, ...]) -> None:
    found = LearnerSettings(preset=preset)
    algorithm = found.algorithm
    assert isinstance(algorithm, ClippedRatio)
    bounds = (algorithm.name, algorithm.clip_low, algorithm.clip_high, found.kl_coefficient)
    assert (*bounds, algorithm.kl_estimator, algorithm.kl_in, algorithm.aggregation) == published
    assert (found.learning_rate, found.weight_decay, found.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (found.schedule, found.warmup_steps, found.min_learning_rate_ratio) == ("cosine", 0, 0.1)
    assert (found.precision, found.gradient_checkpointing) == ("bf16", True)
    assert getattr(algorithm, "std_epsilon", 1e-4) == 1e-4
    assert (algorithm.old_log_probs, found.adam_betas) == ("rollout", (0.9, 0.999))


def test_what_is_written_wins_wherever_it_stands(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[trainer]\nalgorithm = { clip_high = 0.5 }\npreset = "colossalchat-dapo"\nschedule = "constant"\n'
    )
    section = load_config("trainer", TrainerSection, run_file, ["trainer.learning_rate=0.5"]).section
    algorithm = section.algorithm
    assert isinstance(algorithm, ClippedRatio)
    assert (algorithm.clip_high, section.schedule, section.learning_rate) == (0.5, "constant", 0.5)
    assert (algorithm.name, section.weight_decay, section.samples_dynamically) == ("dapo", 0.01, True)


def test_a_preset_has_no_keys_for_another_algorithm() -> None:
    for written in ("rloo", {"name": "rloo"}):
        section = LearnerSettings(preset="colossalchat-grpo", algorithm=written)
        assert (section.algorithm, section.kl_coefficient) == (read_algorithm("rloo"), 0.01)


@pytest.mark.parametrize(
    ("trainer", "overrides", "message"),
    [
        (
            'algorithm = "dapo"\nclip_high = 0.3\nicepop_range = [0.5, 2.0]',
            [],
            "trainer.algorithm: got 'dapo' in {file}: clip_high, icepop_range moved into its table; write "
            'algorithm = {{ name = "dapo", clip_high = 0.3, icepop_range = [0.5, 2.0] }} in their place',
        ),
        (
            "clip_low = 0.1\ngae_lambda = 0.9\n[trainer.critic]\nform = 'head'",
            [],
            "trainer.algorithm: in {file}: clip_low, gae_lambda, critic moved into its table; write "
            'algorithm = {{ name = "grpo", clip_low = 0.1 }} in their place; gae_lambda, critic had no effect',
        ),
        (
            'preset = "colossalchat-rloo"\nkl_in = "reward"',
            [],
            "trainer.algorithm: in {file}: kl_in moved into its table; write "
            'algorithm = {{ name = "rloo", kl_in = "reward" }} in their place',
        ),
        (
            'algorithm = "grpo"',
            ["trainer.algorithm.gae_lambda=0.9", "trainer.algorithm.gamma=1.0"],
            "trainer.algorithm.gae_lambda: got 0.9 in --set: a key of ppo; allowed with grpo: aggregation, clip_high, "
            "clip_low, correction, credit, dual_clip, icepop_range, kl_estimator, kl_in, mask_truncated, "
            "max_mean_ratio, old_log_probs, reward_clip, sequence_mask_cap, sequence_mask_mean, state_weight, "
            "std_epsilon, tis_cap, turn_discount",
        ),
        (
            "algorithm.clip_hihg = 0.3",
            [],
            "unknown key trainer.algorithm.clip_hihg in {file}: did you mean 'clip_high'?",
        ),
        ("algorithm.epsilon = 0.3", [], "unknown key trainer.algorithm.epsilon in {file}: TRL's epsilon is trainer."),
        (
            "algorithm.clip_low = 2",
            [],
            "trainer.algorithm.clip_low: got 2 in {file}: input should be less than or equal",
        ),
        (
            "algorithm.name = 'grop'",
            [],
            "trainer.algorithm.name: got 'grop' in {file}: there is no such algorithm ",
        ),
        ("algorithm.name = ['a']", [], "trainer.algorithm.name: got ['a'] in {file}: there is no such algorithm here"),
        ("algorithm = 'own.py:Own'", [], "trainer.algorithm: got 'own.py:Own' in {file}: there is no such algorithm"),
        ("algorithm = 3", [], "trainer.algorithm: got 3 in {file}: allowed: a name, or a table with a name and keys"),
    ],
)
def test_keys_of_the_algorithm_are_in_its_table(
    trainer: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[trainer]\n{trainer}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config("trainer", TrainerSection, file, overrides)
    assert refused.value.problems[0].startswith(message.format(file=file))


def test_a_line_that_is_named_to_paste_is_what_the_keys_meant(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nalgorithm = "ppo"\ngamma = 0.9\ncritic = { form = "head" }\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config("trainer", TrainerSection, file)
    line = str(refused.value).partition("write ")[2].partition(" in their place")[0]
    file.write_text(f"[trainer]\n{line}\n", encoding="utf-8")
    found = load_config("trainer", TrainerSection, file).section.algorithm
    assert found == read_algorithm({"name": "ppo", "gamma": 0.9, "critic": {"form": "head"}})


def test_overrides_complete_a_name_and_a_name_replaces_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nalgorithm = "dapo"\n', encoding="utf-8")
    completed = load_config("trainer", TrainerSection, file, ["trainer.algorithm.clip_high=0.5"]).section.algorithm
    assert completed == read_algorithm({"name": "dapo", "clip_high": 0.5})
    overrides = ["trainer.algorithm.clip_high=0.5", "trainer.algorithm=rloo"]
    assert load_config("trainer", TrainerSection, file, overrides).section.algorithm == read_algorithm("rloo")


def say_queues() -> None:
    sys.exit(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))


def test_importing_colossalai_leaves_cudas_queues_as_they_were(tmp_path: Path) -> None:
    """The server of forks began with a number of them, and has imported it since."""
    process = Forked(tmp_path / "stderr", say_queues)
    assert process.wait() == 1 and process.said() == f"{CUDA_QUEUES}\n"
