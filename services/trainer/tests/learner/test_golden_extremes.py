"""Losses, KLs, corrections, advantages and values at their extremes, against the formulas written out in Python floats.

Each formula is written here once more, as its paper has it, for one token at a time, with its derivative; the ratio's
exponent is held within ±20 as the documentation says. Compared to 1e-6 in float32 and to 1e-12 in float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import Run, gradients, make_group, make_model, settings
from plain_algorithms import plain_algorithm
from plain_loop import load
from torch import Tensor
from transformers import Qwen2ForCausalLM

from quartet_common.tensors import encode_ragged
from quartet_trainer.algorithms import ALGORITHMS
from quartet_trainer.learner import create_learner
from quartet_trainer.learner.policy import Policy
from quartet_trainer.losses.advantages import group_centered, group_normalized, leave_one_out
from quartet_trainer.losses.correction import (
    masked_importance_weight,
    masked_sequence_weight,
    truncated_importance_weight,
)
from quartet_trainer.losses.kl import KL_ESTIMATORS
from quartet_trainer.losses.policy import clipped_ratio_loss, clipped_weight_loss, sequence_ratio_loss
from quartet_trainer.losses.returns import generalized_advantages, whitened
from quartet_trainer.losses.value import clipped_value_loss

DIFFERENCES = [-400.0, -20.5, -19.5, -3.0, -0.25, 0.0, 0.25, 1.5, 3.0, 19.5, 20.5, 400.0]
"""log p_new - log p_old; 400 overflows float32 and, squared, float64's exponent."""
ADVANTAGES = [-3.0, -0.5, 0.0, 0.5, 3.0]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
GRID = [(difference, advantage) for difference in DIFFERENCES for advantage in ADVANTAGES]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def held(difference: float) -> tuple[float, float]:
    """The exponent as it is taken, and its derivative."""
    return (difference, 1.0) if abs(difference) <= 20 else (math.copysign(20.0, difference), 0.0)


def surrogate(difference: float, advantage: float, dual: float) -> tuple[float, float]:
    """-min(r A, clip(r, 0.8, 1.28) A), at most -dual A where A < 0; and its derivative by the log-prob."""
    exponent, slope = held(difference)
    ratio = math.exp(exponent)
    clipped = min(max(ratio, 0.8), 1.28)
    if dual and advantage < 0 and ratio > dual:
        return -dual * advantage, 0.0
    if ratio * advantage <= clipped * advantage:
        # Inside the bounds both are the same; outside, the ratio itself is the smaller one.
        return -ratio * advantage, -ratio * advantage * slope
    return -clipped * advantage, 0.0


def cispo(difference: float, advantage: float, log_prob: float) -> tuple[float, float]:
    """-sg(min(r, 5)) A log p, and its derivative."""
    weight = min(math.exp(held(difference)[0]), 5.0)
    return -weight * advantage * log_prob, -weight * advantage


KLS: dict[str, Callable[[float], tuple[float, float]]] = {
    # Of d = log p - log p_other, held within 20: the estimate and its derivative by log p.
    "k1": lambda d: (held(d)[0], held(d)[1]),
    "k2": lambda d: (held(d)[0] ** 2 / 2, held(d)[0] * held(d)[1]),
    "k3": lambda d: (math.exp(-held(d)[0]) + held(d)[0] - 1, (1 - math.exp(-held(d)[0])) * held(d)[1]),
}


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """New log-probs with gradient, old ones, advantages: the whole grid. All values are exact in float32."""
    difference, advantage = torch.tensor(GRID, dtype=dtype).T
    old = torch.full_like(difference, -2.0)
    return (old + difference).requires_grad_(), old, advantage.contiguous()


def agree(found: Tensor, expected: list[float], dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), rtol=TOLERANCE[dtype], atol=1e-12
    )


@dtypes
@pytest.mark.parametrize("dual", [0.0, 3.0])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_clipped_surrogates(dtype: torch.dtype, dual: float, of_sequences: bool) -> None:
    """GSPO's ratio of a completion of one token is the token's."""
    new, old, advantages = tokens(dtype)
    if of_sequences:
        losses = sequence_ratio_loss(new, old, advantages, torch.arange(len(GRID)), 0.2, 0.28, dual).loss
    else:
        losses = clipped_ratio_loss(new, old, advantages, 0.2, 0.28, dual).loss
    expected = [surrogate(d, a, dual) for d, a in GRID]
    if of_sequences:  # there the value is held, and the token's own gradient goes on, as for a completion of many
        expected = [
            (value, slope if abs(d) <= 20 else surrogate(held(d)[0], a, dual)[1])
            for (d, a), (value, slope) in zip(GRID, expected, strict=True)
        ]
    agree(losses, [value for value, _ in expected], dtype)
    agree(torch.autograd.grad(losses.sum(), new)[0], [slope for _, slope in expected], dtype)


@dtypes
def test_gspo_of_a_long_completion_of_huge_ratios(dtype: torch.dtype) -> None:
    """Ratios e^300 and e^-300 make 1; the gradient of each token is that of the mean, A r / n."""
    difference = torch.tensor([300.0, -300.0, 0.0, 0.0], dtype=dtype)
    new = difference.clone().requires_grad_()
    old, advantages = torch.zeros(4, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)
    losses = sequence_ratio_loss(new, old, advantages, torch.zeros(4).long(), 0.2, 0.2)
    agree(losses.loss.mean()[None], [-2.0], dtype)
    agree(torch.autograd.grad(losses.loss.mean(), new)[0], [-0.5] * 4, dtype)


@dtypes
def test_cispo(dtype: torch.dtype) -> None:
    new, old, advantages = tokens(dtype)
    losses = clipped_weight_loss(new, old, advantages, None, 4.0).loss
    expected = [cispo(d, a, -2.0 + d) for d, a in GRID]
    agree(losses, [value for value, _ in expected], dtype)
    agree(torch.autograd.grad(losses.sum(), new)[0], [slope for _, slope in expected], dtype)


@dtypes
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl(dtype: torch.dtype, name: str) -> None:
    new = torch.tensor(DIFFERENCES, dtype=dtype, requires_grad=True)
    found = KL_ESTIMATORS[name](new, torch.zeros_like(new))
    expected = [KLS[name](difference) for difference in DIFFERENCES]
    agree(found, [value for value, _ in expected], dtype)
    agree(torch.autograd.grad(found.sum(), new)[0], [slope for _, slope in expected], dtype)


@dtypes
def test_corrections(dtype: torch.dtype) -> None:
    old = torch.tensor(DIFFERENCES, dtype=dtype)
    rollout = torch.zeros_like(old)
    weights = [math.exp(held(difference)[0]) for difference in DIFFERENCES]
    agree(truncated_importance_weight(old, rollout, 2.0), [min(weight, 2.0) for weight in weights], dtype)
    kept = [weight if 0.5 <= weight <= 5.0 else 0.0 for weight in weights]
    agree(masked_importance_weight(old, rollout, 0.5, 5.0), kept, dtype)
    below = [weight if weight <= 3.0 else 0.0 for weight in weights]
    for geometric in (False, True):  # completions of one token: the product is the mean
        agree(masked_sequence_weight(old, rollout, torch.arange(len(old)), 3.0, geometric), below, dtype)


@dtypes
def test_the_weight_of_a_completion(dtype: torch.dtype) -> None:
    """Differences 1, 2 and -2.5 make the product e^0.5 and the geometric mean e^(1/6)."""
    old = torch.tensor([1.0, 2.0, -2.5, 9.0], dtype=dtype)
    sequences = torch.tensor([0, 0, 0, 1])
    for geometric, weight in ((False, math.exp(0.5)), (True, math.exp(0.5 / 3))):
        found = masked_sequence_weight(old, torch.zeros_like(old), sequences, 3.0, geometric)
        agree(found, [weight, weight, weight, 0.0], dtype)


@dtypes
def test_values(dtype: torch.dtype) -> None:
    """Values far off, on both sides of the return, and clips that act and do not."""
    cases = [(v, o, r) for v in (-1e4, -0.1, 0.0, 0.1, 1e4) for o in (-1.0, 0.0, 1.0) for r in (-5.0, 0.0, 5.0)]
    values, old, returns = (torch.tensor(column, dtype=dtype) for column in zip(*cases, strict=True))
    expected = []
    for v, o, r in cases:
        bounded = min(max(v, o - 0.2), o + 0.2)
        free, clipped = (v - r) ** 2, (bounded - r) ** 2
        expected.append((max(free, clipped) / 2, v - r if free >= clipped else 0.0))
    values.requires_grad_()
    losses, _ = clipped_value_loss(values, old, returns, 0.2)
    agree(losses, [value for value, _ in expected], dtype)
    found = torch.autograd.grad(losses.sum(), values)[0].tolist()
    for (v, o, r), slope, (_, by_hand) in zip(cases, found, expected, strict=True):
        inside = abs(v - o) <= 0.2  # then both are the same number, and either's gradient is right
        assert slope == pytest.approx(v - r if inside else by_hand, rel=1e-5, abs=1e-5), (v, o, r)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_advantages_of_tiny_and_huge_rewards(scale: float) -> None:
    rewards = [scale * r for r in (3.0, -1.0, 0.5, 0.5)]
    single = torch.tensor(rewards, dtype=torch.float64)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    group = torch.zeros(4).long()
    relative = {"rel": 1e-9, "abs": 0.0}
    expected = [(r - mean) / (std + 1e-4) for r in rewards]
    assert group_normalized(single, group, 1e-4).tolist() == pytest.approx(expected, **relative)
    assert group_centered(single, group).tolist() == pytest.approx([r - mean for r in rewards], **relative)
    others = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert leave_one_out(single, group).tolist() == pytest.approx(others, **relative)


def test_rewards_in_bf16_lose_nothing_more() -> None:
    rewards = torch.tensor([0.1, 0.7, 1.0, -3.3]).bfloat16()
    group = torch.zeros(4).long()
    exact = [float(r) for r in rewards]
    std = statistics.stdev(exact)
    expected = [(r - statistics.fmean(exact)) / (std + 1e-4) for r in exact]
    found = group_normalized(rewards, group, 1e-4)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_gae_of_completions_of_length_one_and_of_none() -> None:
    """Completion 0 has one trained token, 1 none, 2 two of which the first is far from its value."""
    rows = torch.tensor([0, 1, 1, 2, 2])
    mask = torch.tensor([True, False, False, True, True])
    rewards, values = torch.tensor([2.0, 9.0, 9.0, 0.0, -1.0]), torch.tensor([0.5, 7.0, 7.0, 1e6, 0.25])
    found = generalized_advantages(rewards, values, mask, rows, gamma=1.0, gae_lambda=0.95)
    last = -1.0 - 0.25
    assert found.tolist() == pytest.approx([1.5, 0.0, 0.0, 0.25 - 1e6 + 0.95 * last, last], rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e30, 1e-30])
def test_whitening_without_variance_is_zero(value: float) -> None:
    mask = torch.tensor([True, True, False, True])
    assert (whitened(torch.full((4,), value, dtype=torch.float64), mask) == 0).all()
    assert (
        whitened(torch.full((4,), value, dtype=torch.float64), torch.tensor([True, False, False, False])) == 0
    ).all()


def test_log_probs_of_a_bf16_model_are_its_logits_own(tmp_path: Path) -> None:
    """What bf16 rounds are the logits; log-softmax of them, entropy and temperature are float32's."""
    path = make_model(tmp_path / "model", initializer_range=0.5)
    model = Qwen2ForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.arange(12)[None] * 5 % 64
    columns, targets = torch.arange(11), ids[0, 1:]
    temperatures = torch.linspace(0.5, 2.0, 11)
    with torch.no_grad():
        log_probs, entropy = Policy(model)(ids, torch.zeros(11).long(), columns, None, targets, temperatures)
        logits = model(input_ids=ids).logits[0, :-1].double() / temperatures[:, None].double()
    assert log_probs.dtype == entropy.dtype == torch.float32
    exact = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs.double(), exact.log_prob(targets), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=1e-6, atol=2e-6)


def extremes() -> list[Any]:
    """A batch with a completion without any trained token, a whole group of such, completions of one token, a group
    of equal rewards, ratios of e^14 and of e^-12, and a huge reward."""
    rng = np.random.default_rng(61)

    def rows(group: Any, values: list[list[Any]], dtype: Any) -> Any:
        return encode_ragged([np.asarray(row, dtype=dtype) for row in values], group.dtype)

    masked = make_group(rng, [3, 2, 4], mask=True)
    masked.loss_mask.CopyFrom(rows(masked.loss_mask, [[1, 0, 1], [0, 0], [1, 1, 1, 0]], np.uint8))
    none = make_group(rng, [2, 3], mask=True)
    none.loss_mask.CopyFrom(rows(none.loss_mask, [[0, 0], [0, 0, 0]], np.uint8))
    ones = make_group(rng, [1, 1, 1], prompt=1)
    equal = make_group(rng, [4, 2], rewards=[0.1, 0.1])
    huge = make_group(rng, [3, 3], rewards=[50.0, -2.0])
    huge.rollout_log_probs.CopyFrom(rows(huge.rollout_log_probs, [[-18.0, -4.0, -18.0]] * 2, np.float32))
    rare = make_group(rng, [3, 3], rewards=[1.0, -1.0])
    rare.rollout_log_probs.CopyFrom(rows(rare.rollout_log_probs, [[-1e-4, 0.0, -3.0]] * 2, np.float32))
    return [masked, none, ones, equal, huge, rare]


PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"kl_coefficient": 0.3}, {"beta": 0.3}),
    "dr_grpo": ({}, {}),
    "dapo": ({}, {"high": 0.28}),
    "rloo": ({}, {}),
    "reinforce_pp": ({"kl_coefficient": 0.1}, {"beta": 0.1, "kl_in": "reward", "kl": "k1"}),
    "reinforce_pp_baseline": ({"kl_coefficient": 0.1}, {"beta": 0.1, "kl": "k2"}),
    "gspo": ({"old_log_probs": "rollout"}, {"low": 3e-4, "high": 4e-4}),
    "cispo": ({}, {"high": 4.0}),
    "ppo": ({"max_mean_ratio": 0}, {}),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_of_extremes(model_path: Path, algorithm: str) -> None:
    ours, theirs = PLAIN[algorithm]
    groups = extremes()
    learner = create_learner(settings(algorithm=algorithm, **ours), model_path, Run())
    model, reference = (load(model_path, torch.float64) for _ in range(2))
    critic = learner._critic._model.unwrap() if learner._critic else None
    loss, _ = plain_algorithm(model, groups, algorithm, reference=reference, critic=critic, **theirs)
    loss.backward()
    found = gradients(learner, groups)
    for name, parameter in model.named_parameters():
        near = {"rtol": 1e-6, "atol": 1e-6 * float(parameter.grad.abs().max())}
        torch.testing.assert_close(found[name], parameter.grad, **near, msg=lambda m, n=name: f"{n}: {m}")
    assert learner.train_step(groups)["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_without_a_trained_token_changes_nothing(model_path: Path, algorithm: str) -> None:
    learner = create_learner(settings(algorithm=algorithm, kl_coefficient=0.1), model_path, Run())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    metrics = learner.train_step([extremes()[1]])
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    for name, tensor in learner.weights():
        assert torch.equal(tensor, before[name]), name
