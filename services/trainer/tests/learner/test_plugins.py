"""Under every plugin that runs here: the gradient, the metrics and the weights of one process with whole batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_helpers import Run, make_batch, make_model, settings
from peft import PeftModel
from ranks import run_ranks, whole_gradients
from safetensors.torch import load_file
from test_invariance import assert_same_gradient, comparable
from transformers import AutoModelForCausalLM

from quartet_trainer.learner import LearnerError, create_learner
from quartet_trainer.learner.plugin_settings import PluginSettings
from quartet_trainer.learner.plugins.hybrid_checks import check_model

pytestmark = pytest.mark.timeout(600)  # the ranks start once, within the first test

RANKS = 4
TP2_DP2 = {"plugin": "hybrid_parallel", "tp_size": 2}
PP2_DP2 = {"plugin": "hybrid_parallel", "pp_size": 2}
TP2_PP2 = {"plugin": "hybrid_parallel", "tp_size": 2, "pp_size": 2}
ZERO_1 = {"plugin": "low_level_zero"}
ZERO_2 = {"plugin": "low_level_zero", "zero_stage": 2}
FSDP = {"plugin": "torch_fsdp"}
SPLIT_GATHER = {"sequence_parallel": "split_gather"}
SP2 = {"plugin": "hybrid_parallel", "sequence_parallel": "all_to_all", "sp_size": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
CHECKPOINTING = {"gradient_checkpointing": True}
VALUE_HEAD = {"algorithm": "ppo", "max_mean_ratio": 0, "critic": {"form": "head", "learning_rate": 1e-2}}
COMMON = {"micro_batch_tokens": 60, "max_grad_norm": 0.5}

JOBS: dict[str, dict[str, Any]] = {
    "ddp": {"settings": {"algorithm": "dapo"}},
    "ddp, everything": {"settings": {"algorithm": "dapo", "skip_zero_advantage": False}},
    "tp2-dp2": {"settings": {**TP2_DP2, "algorithm": "dapo"}},
    # Two pipelines of two stages; in one batch one of them has no work, in another none has.
    "pp2-dp2": {"settings": {**PP2_DP2, "algorithm": "dapo"}},
    "tp2-pp2": {"settings": {**TP2_PP2, "entropy_coefficient": 0.05, "kl_coefficient": 0.2, **CHECKPOINTING}},
    "pp2-dp2, llama": {"settings": {**PP2_DP2, "kl_coefficient": 0.2, "kl_in": "reward"}, "model": "llama"},
    "ddp goes on from tp2-dp2": {"settings": {"algorithm": "dapo"}, "resume": "tp2-dp2"},
    "tp2-dp2, zero 1": {"settings": {**TP2_DP2, "algorithm": "dapo", "zero_stage": 1}, "resume": "tp2-dp2"},
    "tp2-dp2, zero 2": {"settings": {**TP2_DP2, "algorithm": "dapo", "zero_stage": 2, "kl_coefficient": 0.2}},
    "pp2-dp2, zero 1, goes on from tp2-dp2, zero 1": {
        "settings": {**PP2_DP2, "algorithm": "dapo", "zero_stage": 1},
        "resume": "tp2-dp2, zero 1",
    },
    "zero 1 goes on from pp2-dp2, zero 1": {
        "settings": ZERO_1,
        "resume": "pp2-dp2, zero 1, goes on from tp2-dp2, zero 1",
    },
    "zero 2 goes on from zero 1": {
        "settings": {**ZERO_2, "kl_coefficient": 0.2},
        "resume": "zero 1 goes on from pp2-dp2, zero 1",
    },
    "zero 2, value head": {"settings": {**ZERO_2, **VALUE_HEAD}},
    "zero 1 goes on from zero 2, value head": {"settings": {**ZERO_1, **VALUE_HEAD}, "resume": "zero 2, value head"},
    "fsdp goes on from ddp": {"settings": {**FSDP, "algorithm": "dapo"}, "resume": "ddp goes on from tp2-dp2"},
    "tp2-pp2 goes on from fsdp": {"settings": TP2_PP2, "resume": "fsdp goes on from ddp"},
    "fsdp, llama": {
        "settings": {**FSDP, "entropy_coefficient": 0.05, "kl_coefficient": 0.2, **CHECKPOINTING},
        "model": "llama",
    },
    "tp2-dp2, split_gather, goes on from tp2-dp2": {
        "settings": {**TP2_DP2, **SPLIT_GATHER, "kl_coefficient": 0.2},
        "resume": "tp2-dp2",
    },
    "tp2-pp2, split_gather": {"settings": {**TP2_PP2, **SPLIT_GATHER, "entropy_coefficient": 0.05, **CHECKPOINTING}},
    "tp2-dp2, split_gather, zero 1, llama": {
        "settings": {**TP2_DP2, **SPLIT_GATHER, "zero_stage": 1},
        "model": "llama",
    },
    "sp2-dp2": {"settings": {**SP2, "algorithm": "dapo", "kl_coefficient": 0.2}},
    "sp2-pp2, llama": {"settings": {**SP2, "pp_size": 2, "entropy_coefficient": 0.05}, "model": "llama"},
    "sp2-dp2, zero 2": {"settings": {**SP2, "zero_stage": 2, **CHECKPOINTING}},
    "pp2-dp2, lora": {"settings": {**PP2_DP2, "lora": LORA, "kl_coefficient": 0.2, **CHECKPOINTING}},
    "sp2-dp2, zero 1, goes on from pp2-dp2, lora": {
        "settings": {**SP2, "zero_stage": 1, "lora": LORA, "kl_coefficient": 0.2},
        "resume": "pp2-dp2, lora",
    },
}
"""Those of ZeRO keep weights in float32, the others here in float64."""
BF16 = {
    "bf16, pp2-dp2": {"settings": {**PP2_DP2, "precision": "bf16"}, "model": "calm"},
    "bf16, tp2-dp2, split_gather, zero 1": {
        "settings": {**TP2_DP2, **SPLIT_GATHER, "precision": "bf16", "zero_stage": 1},
        "model": "calm",
    },
    "bf16, fsdp": {"settings": {**FSDP, "precision": "bf16"}, "model": "calm"},
    "bf16, zero 2": {"settings": {**ZERO_2, "precision": "bf16"}, "model": "calm"},
}
EXPORTED = ("tp2-pp2", "pp2-dp2, llama", "bf16, pp2-dp2", "fsdp, llama", "bf16, fsdp")


def make_batches() -> list[list]:
    """Unequal lengths; a batch with work for one share only; one with work for none."""
    one_needed = make_batch(seed=21, groups=1, size=3)
    one_needed[0].rewards.data = torch.tensor([1.0, 1.0, 4.0]).numpy().tobytes()
    one_needed[0].truncated.data = bytes([1, 1, 0])  # dapo leaves the truncated ones out
    none_needed = make_batch(seed=22, groups=1)
    none_needed[0].rewards.data = bytes(16)
    return [make_batch(seed=20, groups=5, size=3), one_needed, none_needed]


def make_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    calm = make_model(folder / "calm", initializer_range=0.05)
    return {"qwen2": model_path, "llama": make_llama(folder / "llama"), "calm": calm}


@pytest.fixture(scope="session")
def done(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs, in one start of the ranks."""
    out = tmp_path_factory.mktemp("ranks")
    jobs = [
        {
            "name": name,
            "model": str(models[job.get("model", "qwen2")]),
            "settings": {**COMMON, **job["settings"]},
            "resume": job.get("resume"),
            "export": name in EXPORTED or "lora" in job["settings"],
        }
        for name, job in {**JOBS, **BF16}.items()
    ]
    run_ranks(out, RANKS, jobs, make_batches())
    return out


@pytest.mark.parametrize("name", JOBS)
def test_as_one_process(models: dict[str, Path], done: Path, name: str) -> None:
    job, folder, batches = JOBS[name], done / name, make_batches()
    alike = {k: v for k, v in job["settings"].items() if k == "lora" or k not in PluginSettings.model_fields}
    alone = create_learner(settings(**COMMON, **alike), models[job.get("model", "qwen2")], Run())
    if resume := job.get("resume"):
        assert alone.load(done / resume / "checkpoint") == {"saved": resume}
    expected_gradient = whole_gradients(alone, batches[0])
    expected = [alone.train_step(groups) for groups in batches]
    expected_weights = dict(alone.weights())
    exact = job["settings"].get("plugin") != "low_level_zero" and "zero" not in f"{name}, {job.get('resume')}"
    metric_tolerance = {"rel": 1e-5, "abs": 1e-8} if exact else {"rel": 1e-4, "abs": 1e-6}
    for rank in (0, RANKS - 1):
        assert_same_gradient(load_file(folder / f"gradient-{rank}.safetensors"), expected_gradient)
        seen = json.loads((folder / f"seen-{rank}.json").read_text(encoding="utf-8"))
        for ours, theirs in zip(seen["metrics"], expected, strict=True):
            assert comparable(ours) == pytest.approx(comparable(theirs), **metric_tolerance)
        weights = load_file(folder / f"weights-{rank}.safetensors")
        assert list(seen["specs"]) == list(expected_weights)
        assert seen["specs"] == {tensor_name: list(tensor.shape) for tensor_name, tensor in weights.items()}
        for tensor_name, tensor in expected_weights.items():
            torch.testing.assert_close(weights[tensor_name], tensor, rtol=1e-5, atol=1e-7, msg=tensor_name)
    expected_moments = dict(alone._plugin.moments())
    moments = load_file(folder / "checkpoint" / "optimizer.safetensors")
    assert moments.keys() == expected_moments.keys()
    for moment, tensor in expected_moments.items():
        near = {"rtol": 1e-5, "atol": 1e-10} if exact else {"rtol": 1e-4, "atol": 1e-8}
        torch.testing.assert_close(moments[moment], tensor, **near, check_dtype=exact, msg=moment)


@pytest.mark.parametrize(("name", "micro_batches"), [("ddp", (1, 0)), ("ddp, everything", (1, 3))])
def test_where_nothing_moves_the_gradient_nothing_is_computed(done: Path, name: str, micro_batches: tuple) -> None:
    """Of the batch that has work for one completion, and of that which has none."""
    metrics = json.loads((done / name / "seen-0.json").read_text(encoding="utf-8"))["metrics"]
    assert tuple(one["micro_batches"] for one in metrics[1:]) == micro_batches


def test_fsdp_leaves_a_rank_its_share(models: dict[str, Path], done: Path) -> None:
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["llama"]).parameters())
    held = [json.loads((done / "fsdp, llama" / f"seen-{rank}.json").read_text())["held"] for rank in (0, RANKS - 1)]
    assert all(0.9 * whole / RANKS < share < 1.1 * whole / RANKS for share in held)


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_near(models: dict[str, Path], done: Path, name: str) -> None:
    groups = make_batches()[0]
    alone = create_learner(settings(**COMMON), models["calm"], Run()).train_step(groups)
    metrics = json.loads((done / name / "seen-0.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics[0]["loss"] == pytest.approx(alone["loss"], abs=0.02)
    assert metrics[0]["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.05)
    assert metrics[0]["entropy"] == pytest.approx(alone["entropy"], rel=0.01)
    assert metrics[1]["loss"] != 0.0
    weights = load_file(done / name / "weights-0.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("name", EXPORTED)
def test_exports_are_hugging_face_folders(done: Path, name: str) -> None:
    exported = AutoModelForCausalLM.from_pretrained(done / name / "export").state_dict()
    for tensor_name, tensor in load_file(done / name / "weights-0.safetensors").items():
        assert torch.equal(exported[tensor_name], tensor), tensor_name


def test_a_pipelines_adapter_is_exported_merged(models: dict[str, Path], done: Path) -> None:
    folder = done / "pp2-dp2, lora"
    base = AutoModelForCausalLM.from_pretrained(models["qwen2"])
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, folder / "checkpoint" / "adapter").merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    assert exported.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
        has_adapter = any(name.endswith(f"{part}.weight") for part in LORA["target_modules"])
        assert torch.equal(tensor, before[name]) != has_adapter, name


@pytest.mark.parametrize(
    ("values", "config", "message"),
    [
        (TP2_DP2, {}, "trainer.tp_size 2 * trainer.pp_size 1 must divide the number of ranks, 1"),
        (SP2, {}, "trainer.tp_size 1 * trainer.pp_size 1 * trainer.sp_size 2 must divide the number of ranks, 1"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    tmp_path: Path, values: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LearnerError) as caught:
        create_learner(settings(**values), make_model(tmp_path / "model", **config), Run())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "config", "message"),
    [
        (TP2_DP2, {"model_type": "gemma"}, "is tried with qwen2, llama models, not with 'gemma'"),
        (TP2_DP2, {"vocab_size": 63}, "trainer.tp_size 2 does not divide the model's vocab_size, 63"),
        ({**SP2, "tp_size": 2}, {}, "trainer.tp_size 2 * trainer.sp_size 2 does not divide the model's num_key_value"),
        ({**PP2_DP2, "pp_size": 4}, {}, "trainer.pp_size 4 is more than the model's 3 layers"),
        (PP2_DP2, {"use_sliding_window": True}, "the model's attention has a sliding window, which pipeline and"),
        ({**TP2_DP2, **SPLIT_GATHER}, {"use_sliding_window": True}, "the model's attention has a sliding window"),
    ],
)
def test_models_that_cannot_be_spread_are_refused(values: dict[str, Any], config: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = SimpleNamespace(**{"model_type": "qwen2", "num_hidden_layers": 3, **sizes, **config})
    with pytest.raises(LearnerError, match=re.escape(message)):
        check_model(model, settings(**values))
