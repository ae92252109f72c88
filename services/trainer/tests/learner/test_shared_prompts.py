"""A group's prompt is computed once for its completions, and nothing but the time it takes is another."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import (
    LLAMA_SIZES,
    SIZES,
    VOCABULARY,
    assert_near,
    comparable,
    make_batch,
    make_group,
    make_learner,
    make_model,
    save_model,
)
from quartet.v1 import experience_pb2
from test_batches import plan_all
from torch.nn.attention.varlen import varlen_attn

from quartet_trainer.batch import collate, decode_groups
from quartet_trainer.learner import attention
from quartet_trainer.learner.attention import attends_packed
from quartet_trainer.learner.model import load_causal_lm

# --- The numbers ------------------------------------------------------------------------------------------------------


def long_prompts(seed: int, prompt: int) -> list[experience_pb2.GroupTensors]:
    """Prompts of up to so many tokens, of which only a mask spares attention the copies."""
    rng = np.random.default_rng(seed)
    return [make_group(rng, rng.integers(1, 12, 4), prompt=prompt - 7 * index, mask=index == 1) for index in range(3)]


def compare(
    path: Path, prompt: int | None = None, near: tuple[float, float] = (1e-7, 1e-9), **values: Any
) -> dict[str, float]:
    """Two steps must leave the metrics, the gradient's norm among them, and weights that they leave without packing,
    where each completion has a padded row of its own and the family's own attention.

    Returns the metrics of the second.
    """
    rel, abs_ = near
    apart = make_learner(path, share_prompts=False, **values)
    together = make_learner(path, **values)
    for seed in (8, 9):
        groups = make_batch(seed=seed) if prompt is None else long_prompts(seed, prompt)
        expected, found = apart.train_step(groups), together.train_step(groups)
        assert expected["shared_prompt_tokens"] == 0
        assert comparable(found) == pytest.approx(comparable(expected), rel=rel, abs=abs_)
    assert_near(dict(together.weights()), dict(apart.weights()), rtol=10 * rel, atol=10 * abs_)
    return found


@pytest.mark.parametrize(
    "values", [{"micro_batch_tokens": 300, "max_padding": 0.0}, {"gradient_checkpointing": True}], ids=str
)
def test_loss_gradient_and_metrics_are_the_same(model_path: Path, values: dict[str, Any]) -> None:
    """Of each algorithm with short prompts: `test_algorithms`, whose reference computes each completion by itself."""
    assert compare(model_path, prompt=60, **values)["shared_prompt_tokens"] > 0


def test_a_value_heads_first_values_share_prompts_too(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(model_path, algorithm="ppo", critic={"form": "head"})
    compute, seen = learner._plugin.values, []
    monkeypatch.setattr(learner._plugin, "values", lambda one: seen.append(one.packing is not None) or compute(one))
    learner.train_step(make_batch(seed=8))
    assert seen == [True]


def varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What `varlen_attn` computes by its documentation and flash attention's: each segment by itself, its last query
    beside its last key, of `window_size` keys to the left and right of a query (-1: all)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    left, right = window_size
    outputs = []
    for (a, b), (c, d) in zip(cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True):
        for row in range(a, b):
            place = c + (d - c) - (b - a) + row - a
            first = c if left < 0 else max(c, place - left)
            end = d if right < 0 else min(d, place + right + 1)
            keys, values = (
                states[first:end].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value)
            )
            weights = (torch.einsum("hd,khd->hk", query[row], keys) * scale).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outputs)


WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.mark.parametrize("values", [{"num_key_value_heads": 4}, WINDOWED], ids=str)
def test_what_the_variable_length_kernel_is_given(values: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """The kernel is CUDA's alone: what it is handed is computed here by its definition."""
    calls = []

    def kernel(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(inspect.signature(varlen_attn).bind(*given, **named))
        return varlen_reference(*given, **named)

    monkeypatch.setattr(attention, "_takes_varlen", lambda query, value: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    found = compare(make_model(tmp_path, **values), prompt=40)
    assert found["shared_prompt_tokens"] > 0
    at_load = {(2, 0)}  # see _PROBED
    expected = at_load | {(5, 0), (-1, 0)} if values is WINDOWED else {(-1, 0)}
    assert {call.arguments["window_size"] for call in calls} == expected


# --- Windows, caps and sinks ------------------------------------------------------------------------------------------


WINDOW = {**LLAMA_SIZES, "head_dim": 8, "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": WINDOW,
    "Gemma2": {**WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "Gemma3Text": WINDOW,
    "GptOss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None, "pad_token_id": 0},
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("prompt", [None, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_caps_sinks_and_learned_positions_take_part(family: str, prompt: int | None, tmp_path: Path) -> None:
    path = save_model(tmp_path, family, 0.3, **FAMILIES[family])
    precision = "fp32" if family == "GptOss" else "fp64"  # experts have no other
    found = compare(path, prompt, near=(1e-4, 1e-6), learning_rate=1e-5, precision=precision)
    assert found["shared_prompt_tokens"] > 0


# --- Where it cannot be -----------------------------------------------------------------------------------------------


def test_a_family_that_hides_its_window_or_cap_from_attention_is_found_out(tmp_path: Path, monkeypatch: Any) -> None:
    """However long the window, and however small the scores that a cap would bound."""
    forward = attention.packed_attention
    for name, family, cap in (
        ("sliding_window", "Mistral", {}),
        ("softcap", "Gemma2", {"attn_logit_softcapping": 50.0}),
    ):
        path = save_model(tmp_path / name, family, 0.02, **{**WINDOW, "sliding_window": 4096, **cap})
        assert attends_packed(model := load_causal_lm(path, torch.float32, share_prompts=True))
        assert model.config.sliding_window == 4096
        hidden = lambda *given, _name=name, **named: forward(*given, **{**named, _name: None})  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(attention, "packed_attention", hidden)
            assert not attends_packed(load_causal_lm(path, torch.float32, share_prompts=True))


@pytest.mark.parametrize("lengths", [[0, 0], [0, 9], [0, 0, 200, 1]])
@pytest.mark.parametrize("prompt", [1, 40])
@pytest.mark.filterwarnings("error")
def test_completions_without_a_token_stand_nowhere(lengths: list[int], prompt: int) -> None:
    batch = decode_groups([make_group(np.random.default_rng(0), lengths, prompt=prompt)], VOCABULARY)
    micro = collate(batch, plan_all(batch, share_prompts=True), np.arange(len(lengths)))
    assert micro.packing is not None and micro.input_ids.tolist() == [batch.tokens.tolist()]
    assert bool((micro.packing.query_starts.diff() > 0).all())
    blocks, places = micro.packing.blocks
    outputs = torch.cat([block.queries.flatten() for block in blocks])
    assert outputs[places].tolist() == list(range(prompt + sum(lengths)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's variable-length attention needs CUDA")
@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
def test_the_variable_length_kernel_is_as_defined(window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, heads, 64, device="cuda") for n, heads in ((14, 4), (28, 2), (28, 2)))
    starts = [torch.tensor(edges, dtype=torch.int32, device="cuda") for edges in ([0, 8, 11, 14], [0, 8, 19, 28])]
    named = {"scale": 0.125, "window_size": window, "enable_gqa": True}
    found = varlen_attn(*(states.bfloat16() for states in (query, key, value)), *starts, 8, 11, **named)
    expected = varlen_reference(query, key, value, *starts, 8, 11, **named)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
