"""Mixtures of experts, of whose files transformers 5 makes other tensors: updates come as the files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models import _write_tokenizer, read_weights
from transformers import AutoModelForCausalLM

from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.decoder import Decoder
from quartet_rollout.engines.transformers_engine.sequences import EngineSequence
from quartet_rollout.engines.weight_group import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GLM = {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},  # one tensor of all experts
    "GraniteMoe": {"num_local_experts": 4, "tie_word_embeddings": True},  # other names
    "Glm4Moe": GLM,  # a buffer that is saved
}
TOKENS = torch.arange(3, 40)[None]


def write(folder: Path, family: str, seed: int) -> Path:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_a_familys_files(family: str, tmp_path: Path) -> None:
    first, second = (write(tmp_path / str(seed), family, seed) for seed in range(2))
    weights, spec = read_weights(second), ModelSpec.of_folder(str(first))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert {name: shape for name, shape in spec.shapes.items() if name not in spec.tied} == shapes
    decoder = Decoder(str(first), TransformersOptions(device="cpu"))
    decoder.install(iter(weights.items()))
    expected = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(decoder.model(TOKENS).logits, expected(TOKENS).logits)


def test_a_model_in_bf16_installs_a_routers_bias_exactly(tmp_path: Path) -> None:
    folder = write(tmp_path, "Glm4Moe", 0)
    decoder = Decoder(str(folder), TransformersOptions(device="cpu", dtype="bfloat16"))
    weights = {name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}
    bias = next(name for name in weights if name.endswith("e_score_correction_bias"))
    weights[bias] = torch.tensor([9.001, 0.003, 0.0, -9.001])
    decoder.install(iter(weights.items()))
    assert torch.equal(decoder.model.state_dict()[bias], weights[bias])
    assert next(decoder.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["Mixtral", "Glm4Moe"])
def test_the_experts_of_each_token_are_those_of_the_familys_own_forward_pass(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family, 0)
    decoder = Decoder(str(folder), TransformersOptions(device="cpu"))
    prompts, chosen = ([3, 5, 8, 1], [9, 2]), []
    rows = [
        EngineSequence(
            number, 0, prompt, SamplingSettings(max_new_tokens=6, routed_experts=True, seed=1, temperature=1.0)
        )
        for number, prompt in enumerate(prompts)
    ]
    for row in rows:
        decoder.add(row)
    for step in range(6):
        if step == 3:
            decoder.reset_kv_cache()  # what is computed again is recorded again
        decoder.step()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for number, layer in enumerate(model.model.layers):
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            gate.register_forward_hook(lambda *call, number=number: chosen.append((number, call[2])))
    for row in rows:
        chosen.clear()
        completion = row.completion("length")
        tokens = torch.tensor([row.prompt + row.output[:-1]])
        with torch.no_grad():
            model(tokens)
        assert completion.routed_experts is not None
        found = torch.from_numpy(completion.routed_experts.astype(np.int64))
        assert found.shape == (tokens.numel(), 2, 2)
        for number, output in chosen:
            expected = output[2]
            assert torch.equal(found[:, number].sort(-1).values, expected.sort(-1).values)
        routed = {number for number, _ in chosen}
        assert routed and not found[:, [number for number in range(2) if number not in routed]].any()
