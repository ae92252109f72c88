"""Adapters: only they are trained, sent and saved; merged, they are the model that was trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import (
    BIASED,
    LLAMA_SIZES,
    assert_near,
    gradients,
    make_batch,
    make_learner,
    make_model,
    save_model,
)
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from quartet.v1 import tensor_pb2
from reference import batch_loss, load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quartet_common.model_folder import folder_checksum
from quartet_trainer.learner import LearnerError
from quartet_trainer.learner_settings import LoraSection

LORA = {"r": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def with_adapter(path: Path, **values: Any) -> Any:
    return make_learner(path, learning_rate=1e-2, lora=LORA, **values)


def by_hand(path: Path, adapter: dict[str, torch.Tensor]) -> PeftModel:
    """PEFT's model with this adapter, in float64."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=LORA["target_modules"]
    )
    model = get_peft_model(load(path), config)
    names = {f"{name.removesuffix('.weight')}.default.weight": tensor.double() for name, tensor in adapter.items()}
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora_" in name]
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits[0].double()


def copy(learner: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def test_a_step_is_the_step_that_peft_takes(model_path: Path) -> None:
    learner, groups = with_adapter(model_path, aggregation="token-mean"), make_batch(seed=40)
    learner.train_step(make_batch(seed=41))  # after it B is not 0 any more, and A gets a gradient too
    before = copy(learner)
    model = by_hand(model_path, before)
    batch_loss(model, groups)[0].backward()
    expected = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    found = gradients(learner, groups)
    assert_near(found, expected, rtol=1e-5, atol=1e-8)
    assert found.keys() == before.keys()
    assert all(gradient.abs().max() > 0 for gradient in expected.values())


def test_only_the_adapter_is_sent_by_pefts_names_and_the_model_stays(model_path: Path) -> None:
    learner = with_adapter(model_path)
    base = {name: p.clone() for name, p in learner._causal_lm.named_parameters() if not p.requires_grad}
    first = copy(learner)
    learner.train_step(make_batch(seed=42))
    specs = learner.weight_specs()
    assert [(name, tuple(tensor.shape)) for name, tensor in learner.weights()] == [(n, s) for n, _, s in specs]
    assert {dtype for _, dtype, _ in specs} == {tensor_pb2.DTYPE_FLOAT32}
    assert set(first) == set(get_peft_model_state_dict(by_hand(model_path, first)))
    assert all((tensor != first[name]).any() for name, tensor in learner.weights() if "lora_B" in name)
    for name, parameter in learner._causal_lm.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
    lora = learner.lora
    assert (lora.r, lora.alpha, list(lora.target_modules)) == (4, 8.0, LORA["target_modules"])
    assert lora.base_checksum == folder_checksum(model_path)
    assert make_learner(model_path).lora is None


def test_an_export_is_the_merged_model(model_path: Path, tmp_path: Path) -> None:
    learner = with_adapter(model_path)
    learner.train_step(make_batch(seed=43))
    learner.export(tmp_path / "export")
    assert not list((tmp_path / "export").glob("adapter*"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
    torch.testing.assert_close(merged, logits(by_hand(model_path, copy(learner))), rtol=0, atol=1e-4)
    assert (merged - logits(load(model_path))).abs().max() > 1e-2


def test_another_base_or_another_kind_is_refused(model_path: Path, tmp_path: Path) -> None:
    learner = with_adapter(model_path)
    learner.snapshot(tmp_path / "adapter", {})()
    whole = make_learner(model_path)
    whole.snapshot(tmp_path / "whole", {})()
    with pytest.raises(LearnerError, match=r"holds an adapter: trainer\.lora\.r was above 0"):
        whole.load(tmp_path / "adapter")
    with pytest.raises(LearnerError, match=r"holds a whole model: trainer\.lora\.r was 0"):
        learner.load(tmp_path / "whole")
    other = with_adapter(make_model(tmp_path / "other", seed=9))
    with pytest.raises(LearnerError, match=f"is an adapter of the model that was at {model_path}, checksum"):
        other.load(tmp_path / "adapter")


def test_an_adapter_folder_is_as_peft_reads_it_and_may_be_the_start(model_path: Path, tmp_path: Path) -> None:
    learner = with_adapter(model_path)
    learner.train_step(make_batch(seed=47))
    trained, checkpoint = copy(learner), tmp_path / "step-00000001"
    learner.snapshot(checkpoint, {})()
    assert not (checkpoint / "model").exists(), "a checkpoint holds the adapter alone"
    by_peft = PeftModel.from_pretrained(load(model_path), checkpoint / "adapter")
    torch.testing.assert_close(logits(by_peft), logits(by_hand(model_path, trained)), rtol=0, atol=1e-6)
    by_hand(model_path, trained).save_pretrained(tmp_path / "by-peft")
    learner.train_step(make_batch(seed=48))
    for folder in (checkpoint, checkpoint / "adapter", tmp_path / "by-peft"):
        start = make_learner(model_path, learning_rate=1e-2, lora={**LORA, "path": folder})
        assert all(torch.equal(tensor, trained[name].float()) for name, tensor in start.weights()), folder
        assert start.step == 0


def test_the_reference_is_the_model_without_its_adapter(model_path: Path) -> None:
    learner = with_adapter(model_path, kl_coefficient=0.1)
    groups = make_batch(seed=46)
    assert learner.train_step(groups)["kl"] == pytest.approx(0.0, abs=1e-12)
    adapted, base = (logits(by_hand(model_path, copy(learner))), logits(load(model_path)))
    assert (adapted - base).abs().max() > 1e-2
    assert learner.train_step(groups)["kl"] > 1e-4


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "config", "target", "matrix"),
    [
        ("Qwen2Moe", {**EXPERTS, "num_experts": 4}, "down_proj", "model.layers.0.mlp.experts.0.down_proj.weight"),
        ("Glm4Moe", BIASED["Glm4Moe"], "up_proj", "model.layers.1.mlp.experts.0.up_proj.weight"),
    ],
)
def test_a_target_that_experts_have_too_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], target: str, matrix: str
) -> None:
    """Of the folder's matrices of a target's name, which rollouts expect, every one has an adapter, or none."""
    path = save_model(tmp_path, family, **{**LLAMA_SIZES, **config})
    assert matrix in load_file(path / "model.safetensors")
    expected = f"target_modules: '{target}' is also a name of matrices .*, as {matrix}, .*; leave '{target}' out"
    with pytest.raises(LearnerError, match=expected):
        make_learner(path, precision="fp32", lora={"r": 2, "target_modules": ["q_proj", target]})
    sent = make_learner(path, precision="fp32", lora={"r": 2, "target_modules": ["q_proj", "o_proj"]}).weight_specs()
    ends = ("q_proj.weight", "o_proj.weight")
    in_files = [name for name in load_file(path / "model.safetensors") if name.endswith(ends)]
    names = {f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight" for name in in_files for part in "AB"}
    assert {name for name, _, _ in sent} == names


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_rslora_and_all_linear_are_pefts(targets: Any, model_path: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "alpha": 8.0, "use_rslora": True, "target_modules": targets}
    learner = make_learner(model_path, learning_rate=1e-2, lora=lora)
    learner.train_step(make_batch(seed=49))
    adapter = copy(learner)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, use_rslora=True, target_modules=targets)
    peft = get_peft_model(load(model_path), config)
    assert set(adapter) == set(get_peft_model_state_dict(peft))
    names = {f"{name.removesuffix('.weight')}.default.weight": tensor.double() for name, tensor in adapter.items()}
    assert not peft.load_state_dict(names, strict=False).unexpected_keys
    learner.export(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(exported), logits(peft), rtol=0, atol=1e-4)
    assert (logits(exported) - logits(load(model_path))).abs().max() > 1e-2
    sent = learner.lora
    assert sent.alpha / sent.r == pytest.approx(8 / math.sqrt(4), rel=1e-12), "the rollout scales by alpha / r"
    assert {f".{name.split('.lora_')[0].rpartition('.')[2]}" for name in adapter} == {
        f".{n}" for n in sent.target_modules
    }
    learner.snapshot(tmp_path / "step", {})()
    by_peft = PeftModel.from_pretrained(load(model_path), tmp_path / "step" / "adapter")
    torch.testing.assert_close(logits(by_peft), logits(peft), rtol=0, atol=1e-6)


UNSUPPORTED: dict[str, Any] = {
    "init_lora_weights": "pissa_niter_16",
    "bias": "lora_only",
    "exclude_modules": ["v_proj"],
    "target_parameters": ["experts.gate_up_proj"],
    "modules_to_save": ["lm_head"],
    "use_dora": True,
    "rank_pattern": {"q_proj": 2},
    "layers_to_transform": [0],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 1]],
    "peft_type": "LOHA",
    "a_key_of_tomorrow": 0.5,
}


@pytest.mark.parametrize("key", [*UNSUPPORTED, "init_lora_weights=olora", "init_lora_weights=loftq"])
def test_a_start_whose_configuration_is_not_honored_is_refused_by_name(key: str, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj"])
    config.save_pretrained(tmp_path)
    lora = {"r": 4, "alpha": 8.0, "target_modules": ["q_proj"], "path": tmp_path}
    assert LoraSection(**lora).path == tmp_path, "PEFT's own defaults are taken"
    file = tmp_path / "adapter_config.json"
    key, _, value = key.partition("=")
    content = {**json.loads(file.read_text(encoding="utf-8")), key: value or UNSUPPORTED[key]}
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"has {key} = .* does not train; allowed: .*; or merge it into its base"):
        LoraSection(**lora)


def test_a_start_of_another_scale_is_refused(tmp_path: Path) -> None:
    LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj"]).save_pretrained(tmp_path)
    lora = {"r": 4, "alpha": 8.0, "target_modules": ["q_proj"], "path": tmp_path}
    assert LoraSection(**lora, use_rslora=True).use_rslora
    with pytest.raises(ValueError, match="has use_rslora = true; set lora's to the same"):
        LoraSection(**lora)
