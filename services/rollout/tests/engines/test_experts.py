"""Mixtures of experts, of whose files transformers 5 makes other tensors: updates come as the files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import _write_tokenizer, read_weights
from transformers import AutoModelForCausalLM

from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.decoder import Decoder
from quartet_rollout.weight_sync.spec import ModelSpec

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
