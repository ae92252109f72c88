"""The weights as others get them: by name, and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import LLAMA_SIZES, assert_near, make_batch, make_learner, make_model, save_model
from quartet.v1 import tensor_pb2
from reference import own_attention
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quartet_trainer.errors import LearnerError

CONFIGS = json.loads((Path(__file__).parent / "configs_by_version.json").read_text(encoding="utf-8"))
"""config.json of one model of each family, as versions of transformers wrote it; made by `tests/folders/models.py`."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def trained(path: Path, **values):
    learner = make_learner(path, precision="fp32", learning_rate=1e-2, **values)
    learner.train_step(make_batch())
    return learner


def log_probs(path: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor(ids)[None]).logits[0].double(), dim=-1)


def test_an_untied_head_is_sent_and_the_dtype_is_the_folders(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=False)
    learner = trained(path)
    assert ("lm_head.weight", tensor_pb2.DTYPE_BFLOAT16, (64, 32)) in learner.weight_specs()
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in learner.weights())
    learner.export(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert exported.dtype == torch.bfloat16
    for name, tensor in learner.weights():
        assert torch.equal(exported.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", ["Mixtral", "GPTNeoX"])
def test_names_are_the_folders_whatever_transformers_makes_of_its_tensors(family: str, tmp_path: Path) -> None:
    """Of Mixtral's experts it makes one tensor, GPT-NeoX's head it calls otherwise."""
    path, step = save_model(tmp_path / "model", family, 0.02, **LLAMA_SIZES, num_local_experts=2), tmp_path / "step"
    learner = trained(path)
    source, weights = load_file(path / "model.safetensors"), dict(learner.weights())
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: t.shape for name, t in source.items()}
    assert {name: shape for name, _, shape in learner.weight_specs()} == {n: tuple(t.shape) for n, t in source.items()}
    learner.export(tmp_path / "export")
    assert_near(load_file(tmp_path / "export" / "model.safetensors"), weights, rtol=0, atol=0)
    learner.snapshot(step, {})()
    assert_near(load_file(step / "model" / "model.safetensors"), weights, rtol=0, atol=0)
    resumed = make_learner(path, precision="fp32")
    resumed.load(step)
    assert_near(dict(resumed.weights()), weights, rtol=0, atol=0)


def test_an_export_is_the_trained_model_with_all_its_companions(model_path: Path, tmp_path: Path) -> None:
    learner = trained(model_path)
    learner.export(tmp_path / "export")
    ours, source = (
        json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (tmp_path / "export", model_path)
    )
    assert {name: ours[name] for name in source} == source
    assert {name: ours[name] for name in ours.keys() - source} == {"rope_theta": 1e6, "torch_dtype": "float32"}
    assert (tmp_path / "export" / "tokenizer_config.json").read_bytes() == (
        model_path / "tokenizer_config.json"
    ).read_bytes()
    ids = list(range(40))
    with torch.no_grad(), own_attention(learner._causal_lm):
        inside = torch.log_softmax(learner._causal_lm(input_ids=torch.tensor(ids)[None]).logits[0].double(), dim=-1)
    torch.testing.assert_close(log_probs(tmp_path / "export", ids), inside, rtol=0, atol=1e-5)
    assert (log_probs(model_path, ids) - inside).abs().max() > 1e-2


@pytest.mark.parametrize("values", [{}, {"lora": {"r": 4, "target_modules": ["q_proj"]}}], ids=["whole", "adapter"])
def test_a_value_head_starts_at_0_and_is_neither_sent_nor_exported(
    model_path: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    critic = {"algorithm": "ppo", "critic": {"form": "head"}}
    head, plain = (make_learner(model_path, **each) for each in ({**critic, **values}, values))
    assert not any(parameter.any() for parameter in head._plugin.value_head.parameters())
    assert [name for name, _ in head.weights()] == [name for name, _ in plain.weights()]
    assert head.weight_specs() == plain.weight_specs()
    head.export(tmp_path / "head")
    plain.export(tmp_path / "plain")
    names, expected = ({path.name for path in (tmp_path / folder).iterdir()} for folder in ("head", "plain"))
    assert names == expected
    exported, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("head", "plain"))
    assert exported.keys() == expected.keys()


@pytest.mark.parametrize("family", CONFIGS)
def test_folders_of_any_age_train_alike_and_are_exported_for_all(family: str, tmp_path: Path) -> None:
    """`make folders` has each version of transformers read what was exported; here version 5 reads the keys of 4."""
    ids = [(7 * i) % 64 for i in range(60)]  # long enough for one rope_theta to differ from another
    found: list[torch.Tensor] = []
    for version, config in CONFIGS[family].items():
        path = write(tmp_path / version, config)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(path, max_shard_size="60KB" if version.startswith("4.51") else "1GB")
        write(path, config)
        trained(path).export(path / "export")
        exported = json.loads((path / "export" / "config.json").read_text(encoding="utf-8"))
        found.append(log_probs(path / "export", ids))
        write(path / "export", {key: exported[key] for key in exported.keys() - {"rope_parameters", "dtype"}})
        found.append(log_probs(path / "export", ids))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=1e-5)
    rope = {key for key in exported if "rope" in key or "rot" in key}
    write(path / "export", {key: exported[key] for key in exported.keys() - rope})
    assert (log_probs(path / "export", ids) - found[0]).abs().max() > 1e-2


def test_a_checkpoint_holds_the_float32_weights_and_is_a_model_of_the_folders_dtype(tmp_path: Path) -> None:
    path, step = make_model(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "step-00000001"
    learner = trained(path)
    learner.snapshot(step, {})()
    masters = {name: tensor.clone() for name, tensor in learner._plugin.weights()}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16()).any() for tensor in masters.values()), "rounding would be seen"
    resumed = make_learner(path, precision="fp32")
    resumed.load(step)
    assert all(torch.equal(tensor, masters[name]) for name, tensor in resumed._plugin.weights())
    start = trained(step / "model")  # of another run
    assert start.weight_specs() == learner.weight_specs()
    assert {dtype for _, dtype, _ in start.weight_specs()} == {tensor_pb2.DTYPE_BFLOAT16}
    start.export(tmp_path / "export")
    for folder in (step / "model", tmp_path / "export"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}, folder


def test_what_lies_beside_the_weights_is_kept_in_checkpoints_and_exports(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    kept = [
        *("generation_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "vocab.json"),
        *("tokenizer.model.v3", "tekken.json", "sentencepiece.bpe.model", "source.spm", "vocab.bpe", "qwen.tiktoken"),
    ]
    left = ("README.md", "pytorch_model.bin", "model.safetensors.index.json", "optimizer.pt", "trainer_state.json")
    (path / "additional_chat_templates").mkdir()
    for name in (*kept, *left):
        (path / name).write_text("{}" if name.endswith(".json") else name, encoding="utf-8")
    (path / "model.safetensors.index.json").unlink()  # it was of other files
    learner = trained(path)
    learner.export(tmp_path / "export")
    learner.snapshot(tmp_path / "step", {})()
    for folder in (tmp_path / "export", tmp_path / "step" / "model"):
        assert all((folder / name).read_bytes() == (path / name).read_bytes() for name in kept), folder
        assert not [name for name in left if (folder / name).exists()], folder


def test_a_head_other_than_the_config_says_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    config, file = json.loads((path / "config.json").read_text(encoding="utf-8")), path / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    assert "lm_head.weight" not in dict(make_learner(path).weights()), "the same head twice is one head"
    save_file({**weights, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    with pytest.raises(LearnerError, match="has tie_word_embeddings = true, and the weights have an output matrix"):
        make_learner(path)
    write(path, {**config, "tie_word_embeddings": False})
    assert "lm_head.weight" in dict(make_learner(path).weights())
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(LearnerError, match=r"lack 1 of the model's tensors, lm_head.weight among them; .* = true in"):
        make_learner(path)


def test_exported_critic_gives_the_same_values_as_the_model_of_another_training(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    learner = trained(path, algorithm="ppo", critic={"learning_rate": 1e-2})
    learner.export(tmp_path / "run" / "model")
    other = make_learner(path, precision="fp32", algorithm="ppo", critic={"model": tmp_path / "run" / "critic"})
    ours, theirs = (
        {name: tensor for name, tensor in one._critic.copies().items() if name.startswith("model/")}
        for one in (learner, other)
    )
    assert ours.keys() == theirs.keys() and ours["model/head.weight"].abs().max() > 0
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_export_without_a_separate_critic_writes_none(tmp_path: Path) -> None:
    learner = trained(make_model(tmp_path / "model"), algorithm="ppo", critic={"form": "head"})
    learner.export(tmp_path / "run" / "model")
    assert [folder.name for folder in (tmp_path / "run").iterdir()] == ["model"]
