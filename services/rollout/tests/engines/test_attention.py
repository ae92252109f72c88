"""The transformers engine's own attention: rows of different length, windows, and models that it cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import write_model
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen2Config

from quartet_rollout.engines.base import EngineError, SamplingSettings
from quartet_rollout.engines.options import TransformersOptions, VllmOptions
from quartet_rollout.engines.transformers_engine.decoder import Decoder
from quartet_rollout.engines.transformers_engine.sequences import EngineSequence
from quartet_rollout.engines.vllm_engine import prepare

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, Any] = {
    "a window in every layer": MistralConfig(**SIZES, sliding_window=6),
    "a window in one layer": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "no window": Qwen2Config(**SIZES),
    "scores and logits with a cap": Gemma2Config(
        **SIZES, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
}


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """A decoder switches them off for its thread: here, that of all other tests."""
    yield
    torch.set_grad_enabled(True)


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model, with the tests' tokenizer."""
    write_model(tmp_path, tied=True, seed=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param], dtype=torch.float32)
    for old in tmp_path.glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(tmp_path)
    return tmp_path


def finished(decoder: Decoder) -> dict[int, EngineSequence]:
    """All rows, by their number, when they have ended."""
    made = {}
    while decoder.busy:
        made |= {row.number: row for row, _ in decoder.step()}
    return made


def test_rows_of_different_length_are_as_if_each_were_alone(folder: Path) -> None:
    decoder = Decoder(str(folder), TransformersOptions(device="cpu", max_num_seqs=3))
    prompts = {length: [(7 * length + i) % 100 for i in range(length)] for length in (1, 9, 4, 12, 2)}
    for length, prompt in prompts.items():
        decoder.add(EngineSequence(length, 0, prompt, SamplingSettings(temperature=0.0, max_new_tokens=10 + length)))
    made = finished(decoder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for length, prompt in prompts.items():
        tokens = made[length].output
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, dim=-1).max(-1).values
        np.testing.assert_allclose(made[length].log_probs, expected, atol=TOLERANCE)


def test_a_context_ends_where_rotary_frequencies_would_change(tmp_path: Path) -> None:
    prepare(VllmOptions())
    from quartet_rollout.engines.vllm_engine.arguments import engine_arguments

    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [9.0] * 16}
    write_model(tmp_path, tied=True, seed=0, rope_scaling={**rope, "original_max_position_embeddings": 64})
    assert Decoder(str(tmp_path), TransformersOptions(device="cpu")).max_model_len == 64
    assert Decoder(str(tmp_path), TransformersOptions(device="cpu", max_model_len=32)).max_model_len == 32
    assert engine_arguments(str(tmp_path), VllmOptions())["max_model_len"] == 64
    for load, options in ((Decoder, TransformersOptions), (engine_arguments, VllmOptions)):
        with pytest.raises(EngineError, match=r"\.max_model_len is 65; allowed: at most 64, as beyond"):
            load(str(tmp_path), options(max_model_len=65))


def test_a_row_that_overflowed_does_not_reach_those_that_get_its_slot(tmp_path: Path) -> None:
    write_model(tmp_path, tied=True, seed=0)
    decoder = Decoder(str(tmp_path), TransformersOptions(device="cpu", max_num_seqs=2))
    greedy = SamplingSettings(temperature=0.0, max_new_tokens=40)
    first, second, new = (
        EngineSequence(n, 0, prompt, greedy) for n, prompt in enumerate(([20], [21, 22], [23, 24, 25]))
    )
    decoder.add(first)
    decoder.add(second)
    decoder.step()
    assert decoder.rows == [first, second]
    for layer in decoder._slots.layers:  # As if the first row's keys and values were too large for their type.
        layer.keys[0], layer.values[0] = float("inf"), float("nan")
    decoder.remove([first])  # The second row moves into its slot.
    decoder.add(new)
    made = finished(decoder)
    assert len(made) == 2 and all(np.isfinite(row.log_probs).all() for row in made.values())
