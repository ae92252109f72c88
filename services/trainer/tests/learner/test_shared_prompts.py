"""A group's prompt is computed once for its completions, and nothing but the time it takes is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, Run, assert_near, comparable, make_batch, make_group, make_model, settings
from quartet.v1 import experience_pb2
from test_batches import plan_all
from transformers import AutoModelForCausalLM, BioGptConfig, FalconConfig, GPTNeoXConfig, OPTConfig

from quartet_trainer.batches import collate, decode_groups
from quartet_trainer.batches.dealing import deal_groups
from quartet_trainer.batches.shared_prompts import Part, SharedPrompts
from quartet_trainer.learner import create_learner
from quartet_trainer.learner import shared_attention as shared_attention_module
from quartet_trainer.learner.loading import load_causal_lm
from quartet_trainer.learner.shared_attention import shares_prompts

# --- The layout -------------------------------------------------------------------------------------------------------


def test_a_layout_worked_by_hand() -> None:
    """Prompts a b c d e and f g h, completions u v, w of the first, x of the second:

    place  0 1 2 3 4 5 6 7 8 9 10 11
    token  a b c d e f g h u v w  x
    """
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [2, 1], prompt=5), make_group(rng, [1], prompt=3)]
    batch = decode_groups(groups, VOCABULARY)
    plan = plan_all(batch, share_prompts=True)
    micro = collate(batch, plan, np.arange(3))
    assert micro.shared is not None
    prompts, answers = micro.shared.parts
    assert prompts.queries.tolist() == prompts.keys.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]]
    assert prompts.mask is None
    assert answers.queries.tolist() == [[8, 9], [10, 0], [11, 0]]
    assert answers.keys.tolist() == [[0, 1, 2, 3, 4, 8, 9], [0, 1, 2, 3, 4, 10, 0], [5, 6, 7, 0, 0, 11, 0]]
    assert answers.mask is not None and answers.mask.shape == (3, 1, 2, 7)
    assert answers.mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1, 1, 1, 0]] * 2 + [[1, 1, 1, 0, 0, 1, 0]]
    assert answers.mask[0, 0, 1].all()
    assert micro.shared.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 14]
    assert micro.shared.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 5, 3]]


def test_a_mask_is_not_made_larger_than_allowed(monkeypatch: Any) -> None:
    batch = decode_groups([make_group(np.random.default_rng(0), [8] * 4, prompt=60)], VOCABULARY)
    plan = plan_all(batch, share_prompts=True)

    def masked() -> bool:
        return any(part.mask is not None for part in collate(batch, plan, np.arange(4)).shared.parts)

    monkeypatch.setattr("quartet_trainer.batches.shared_prompts.MOST_MASKED", 4 * 8 * 68)
    assert masked()
    monkeypatch.setattr("quartet_trainer.batches.shared_prompts.MOST_MASKED", 4 * 8 * 68 - 1)
    assert not masked()


@pytest.mark.parametrize("lengths", [[0, 0], [0, 9], [0, 0, 200, 1]])
@pytest.mark.parametrize("prompt", [1, 40])
@pytest.mark.filterwarnings("error")
def test_completions_without_a_token_stand_nowhere(lengths: list[int], prompt: int) -> None:
    batch = decode_groups([make_group(np.random.default_rng(0), lengths, prompt=prompt)], VOCABULARY)
    micro = collate(batch, plan_all(batch, share_prompts=True), np.arange(len(lengths)))
    assert micro.shared is not None and micro.input_ids.tolist() == [batch.tokens.tolist()]
    outputs = torch.cat([part.queries.flatten() for part in micro.shared.parts])
    assert outputs[micro.shared.places].tolist() == list(range(prompt + sum(lengths)))


def test_groups_are_dealt_whole_where_that_spares_tokens() -> None:
    groups = np.repeat(np.arange(4), 3)
    prompts, answers = np.repeat([100, 90, 80, 70], 3), np.full(12, 10)
    longest_first = np.arange(12)
    ranks = deal_groups(longest_first, groups, prompts, answers, 2)
    # 130 and 100 tokens, 120 and 110: the largest and the smallest together.
    assert ranks.tolist() == [0] * 3 + [1] * 6 + [0] * 3
    # One group, or completions that dwarf their prompts: single ones.
    assert np.bincount(deal_groups(longest_first[:3], groups, prompts, answers, 2), minlength=2).min() > 0
    long = np.array([4000, 10, 10] * 4)
    longest_first = np.argsort(-long, kind="stable")
    ranks = deal_groups(longest_first[:3], groups, np.ones(12, dtype=np.int64), long, 3)
    assert sorted(ranks.tolist()) == [0, 1, 2]
    assert deal_groups(longest_first, groups, prompts, answers, 1).tolist() == [0] * 12
    assert deal_groups(longest_first[:0], groups, prompts, answers, 2).size == 0


# --- The numbers ------------------------------------------------------------------------------------------------------


def long_prompts(seed: int, prompt: int) -> list[experience_pb2.GroupTensors]:
    """Prompts of up to so many tokens, of which only a mask spares attention the copies."""
    rng = np.random.default_rng(seed)
    return [make_group(rng, rng.integers(1, 12, 4), prompt=prompt - 7 * index, mask=index == 1) for index in range(3)]


def compare(path: Path, prompt: int | None = None, **values: Any) -> dict[str, float]:
    """Two steps must leave the metrics, the gradient's norm among them, and weights that they leave without sharing.

    Returns the metrics of the second.
    """
    apart = create_learner(settings(share_prompts=False, **values), path, Run())
    together = create_learner(settings(**values), path, Run())
    for seed in (8, 9):
        groups = make_batch(seed=seed) if prompt is None else long_prompts(seed, prompt)
        expected, found = apart.train_step(groups), together.train_step(groups)
        assert expected["shared_prompt_tokens"] == 0
        assert comparable(found) == pytest.approx(comparable(expected), rel=1e-7, abs=1e-9)
    assert_near(dict(together.weights()), dict(apart.weights()), rtol=1e-6, atol=1e-8)
    return found


@pytest.mark.parametrize(
    ("prompt", "values"),
    [
        (None, {"mini_batches": 2, "epochs": 2}),
        (60, {}),
        (60, {"micro_batch_tokens": 300, "max_padding": 0.0}),
        (60, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_loss_gradient_and_metrics_are_the_same(model_path: Path, prompt: int | None, values: dict[str, Any]) -> None:
    """Of each algorithm with short prompts: `test_algorithms`, whose reference computes each completion by itself."""
    assert compare(model_path, prompt=prompt, **values)["shared_prompt_tokens"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_no_kernel_holds_all_scores_at_once(dtype: torch.dtype, autocast: bool, masked: bool, monkeypatch: Any) -> None:
    """Beside the CPU, float32 or a mask with fewer keys' than queries' heads would fall to one that does: those are
    repeated."""
    seen = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **values: Any) -> torch.Tensor:
        seen.append((query.shape[1], key.shape[1], value.shape[1], values["enable_gqa"]))
        return query

    monkeypatch.setattr(shared_attention_module, "scaled_dot_product_attention", attention)
    places = torch.zeros(2, 3).long()
    part = Part(places, places, torch.ones(2, 1, 3, 3).bool() if masked else None)
    shared = SharedPrompts(torch.zeros(1, 3).long(), (part,), torch.zeros(3).long()).to(torch.device("meta"))
    query, key = (torch.empty(1, heads, 3, 8, dtype=dtype, device="meta") for heads in (4, 2))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    shared_attention_module.shared_attention(torch.nn.Module(), query, key, key, None, shared_prompts=shared)
    repeated = masked or (dtype == torch.float32 and not autocast)
    assert seen == [(4, 4, 4, False) if repeated else (4, 2, 2, True)]


def test_repeated_keys_are_the_same_keys(model_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_attention_module, "_takes_fewer_keys", lambda query, shared: False)
    assert compare(model_path)["shared_prompt_tokens"] > 0
    assert compare(model_path, prompt=60)["shared_prompt_tokens"] > 0


# --- Where it cannot be -----------------------------------------------------------------------------------------------


def test_a_window_keeps_prompts_apart(tmp_path: Path) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    path = make_model(tmp_path, **windowed)
    assert compare(path)["shared_prompt_tokens"] == 0


def save(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SIZES, intermediate_size=64),
        BioGptConfig(**SIZES, intermediate_size=64),
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    ],
    ids=lambda config: config.model_type,
)
def test_models_with_positions_or_norms_of_another_kind(config: Any, tmp_path: Path) -> None:
    assert compare(save(config, tmp_path), gradient_checkpointing=True)["shared_prompt_tokens"] > 0


def test_a_model_that_attends_in_its_own_way_keeps_prompts_apart(tmp_path: Path, caplog: Any) -> None:
    """Falcon takes no arguments for its attention."""
    path = save(FalconConfig(**SIZES), tmp_path)
    with caplog.at_level("INFO"):
        model = load_causal_lm(path, torch.float32, share_prompts=True)
    assert not shares_prompts(model) and model.config._attn_implementation == "sdpa"
    assert "FalconForCausalLM attends in a way of its own" in caplog.text
