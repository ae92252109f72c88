"""The transformers engine's packed weights: what they compute, and that they follow an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import write_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.decoder import Decoder

TOKENS = [(11 * n) % 90 for n in range(48)]
LARGE = Qwen2Config(
    vocab_size=640, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=8, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """A decoder switches them off for its thread: here, that of all other tests."""
    yield
    torch.set_grad_enabled(True)


def write_large(folder: Path, seed: int) -> nn.Module:
    """Write a random model whose layers are large enough, with the tests' tokenizer, and return it."""
    write_model(folder, tied=True, seed=0)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LARGE, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a new model
            nn.init.normal_(parameter)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(folder)
    return model


def expected(model: nn.Module) -> list[float]:
    with torch.no_grad():
        log_probs = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def packed(decoder: Decoder) -> set[str]:
    linears = {name: module for name, module in decoder.model.named_modules() if isinstance(module, nn.Linear)}
    return {name.rpartition(".")[2] for name, linear in linears.items() if "forward" in vars(linear)}


def test_packed_layers_give_the_log_probs_of_transformers_before_and_after_an_update(tmp_path: Path) -> None:
    first = write_large(tmp_path, seed=0)
    decoder = Decoder(str(tmp_path), TransformersOptions(device="cpu", dtype="float32"))
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    assert packed(decoder) == {*attention, *mlp, "lm_head"}
    assert decoder.log_probs(TOKENS, 1) == pytest.approx(expected(first), abs=1e-4)
    second = write_large(tmp_path, seed=1)
    assert decoder.log_probs(TOKENS, 1) != pytest.approx(expected(second), abs=1e-1)
    decoder.install(iter(second.state_dict().items()))
    assert decoder.log_probs(TOKENS, 1) == pytest.approx(expected(second), abs=1e-4)


def test_layers_of_another_dtype_or_size_are_not_packed(tmp_path: Path) -> None:
    write_large(tmp_path, seed=0)
    assert packed(Decoder(str(tmp_path), TransformersOptions(device="cpu", dtype="bfloat16"))) == set()
    small = tmp_path / "small"
    write_model(small, tied=True, seed=0)
    assert packed(Decoder(str(small), TransformersOptions(device="cpu", dtype="float32"))) == set()
