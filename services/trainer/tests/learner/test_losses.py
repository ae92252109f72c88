"""Losses, KLs, corrections, advantages, returns and values: by hand, and over their whole range against `reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, tensor

from quartet_trainer.learner.metrics import target_metrics
from quartet_trainer.losses.advantages import group_centered, group_normalized, group_std, leave_one_out
from quartet_trainer.losses.aggregation import token_weights
from quartet_trainer.losses.correction import (
    masked_importance_weight,
    masked_sequence_weight,
    truncated_importance_weight,
)
from quartet_trainer.losses.kl import KL_ESTIMATORS, k1, k2, k3
from quartet_trainer.losses.policy import clipped_ratio_loss, clipped_weight_loss, sequence_ratio_loss
from quartet_trainer.losses.returns import generalized_advantages, returns_to_go, token_rewards, whitened
from quartet_trainer.losses.value import clipped_value_loss

DIFFERENCES = [-400.0, -20.5, -19.5, -3.0, -0.25, 0.0, 0.25, 1.5, 3.0, 19.5, 20.5, 400.0]
"""log p_new - log p_old; 400 overflows float32 and, squared, float64's exponent."""
GRID = [(difference, advantage) for difference in DIFFERENCES for advantage in (-3.0, -0.5, 0.0, 0.5, 3.0)]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ROWS, MASK = tensor([0, 0, 0, 1, 1]), tensor([True, False, True, True, True])
"""Two completions of three and two tokens; the second token of the first is not trained."""

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def agree(losses: Tensor, by: Tensor, expected: list[reference.Slope]) -> None:
    """Values and gradients."""
    (slopes,) = torch.autograd.grad(losses.sum(), by)
    assert losses.dtype == slopes.dtype == by.dtype
    for found, wanted in zip((losses, slopes), zip(*expected, strict=True), strict=True):
        close = {"rtol": TOLERANCE[by.dtype], "atol": 1e-12}
        torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), **close)


# --- The policy's losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),  # on policy: the gradient is -A
        (1.1, 2.0, -2.2, -2.2, False, False),
        (1.5, 2.0, -2.56, 0.0, False, True),  # a good token, probable enough already: -1.28 A, no gradient
        (0.5, 2.0, -1.0, -1.0, False, False),  # a good token grown improbable still counts
        (0.5, -2.0, 1.6, 0.0, True, False),  # a bad token, improbable enough already: -0.8 A, no gradient
        (1.5, -2.0, 3.0, 3.0, False, False),  # a bad token grown probable still counts
        (10.0, -2.0, 6.0, 0.0, False, True),  # unless by so much: dual clip, 3
        (1.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_a_clipped_ratio_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool
) -> None:
    """Bounds 0.8 and 1.28."""
    log_probs = tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = clipped_ratio_loss(log_probs, torch.zeros(1), tensor([advantage]).double(), 0.2, 0.28, dual_clip=3.0)
    agree(found.loss, log_probs, [(loss, gradient)])
    assert (found.clipped_low.item(), found.clipped_high.item()) == (low, high)


@dtypes
@pytest.mark.parametrize("dual", [0.0, 3.0])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_clipped_ratios(dtype: torch.dtype, dual: float, of_sequences: bool) -> None:
    """GSPO's ratio of a completion of one token is the token's."""
    difference, advantages = torch.tensor(GRID, dtype=dtype).T.contiguous()
    old = torch.full_like(difference, -2.0)
    new = (old + difference).requires_grad_()
    expected = [reference.surrogate(d, a, 0.2, 0.28, dual) for d, a in GRID]
    if of_sequences:
        losses = sequence_ratio_loss(new, old, advantages, torch.arange(len(GRID)), 0.2, 0.28, dual).loss
        # There the value is held, and the token's own gradient goes on, as for a completion of many.
        inner = [reference.surrogate(reference.held(d)[0], a, 0.2, 0.28, dual) for d, a in GRID]
        expected = [(value, slope) for (value, _), (_, slope) in zip(expected, inner, strict=True)]
    else:
        losses = clipped_ratio_loss(new, old, advantages, 0.2, 0.28, dual).loss
    agree(losses, new, expected)


def test_gspo_has_one_ratio_a_completion() -> None:
    """Ratios 2 and 8 of one completion: geometric mean 4. Mean of the tokens' losses: gradient 4 A / 2 for each."""
    log_probs = tensor([2.0, 8.0, 1.0]).log().requires_grad_()
    found = sequence_ratio_loss(log_probs, torch.zeros(3), torch.ones(3), tensor([0, 0, 1]), 0.2, 9.0)
    assert found.loss.tolist() == pytest.approx([-4.0, -4.0, -1.0])
    (gradient,) = torch.autograd.grad(found.loss[:2].mean(), log_probs)
    assert gradient.tolist() == pytest.approx([-2.0, -2.0, 0.0])


@dtypes
def test_gspo_of_a_long_completion_of_huge_ratios(dtype: torch.dtype) -> None:
    """Ratios e^300 and e^-300 make 1; the gradient of each token is that of the mean, A r / n."""
    new = torch.tensor([300.0, -300.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    old, advantages = torch.zeros(4, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)
    agree(sequence_ratio_loss(new, old, advantages, torch.zeros(4).long(), 0.2, 0.2).loss / 4, new, [(-0.5, -0.5)] * 4)


@dtypes
def test_cispo(dtype: torch.dtype) -> None:
    difference, advantages = torch.tensor(GRID, dtype=dtype).T.contiguous()
    old = torch.full_like(difference, -2.0)
    new = (old + difference).requires_grad_()
    losses = clipped_weight_loss(new, old, advantages, None, 4.0).loss
    agree(losses, new, [reference.cispo(d, a, -2.0 + d, 4.0) for d, a in GRID])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    log_probs = tensor([0.1, 1.0, 10.0]).log().requires_grad_()
    for low, weights in ((None, [0.1, 1.0, 5.0]), (0.5, [0.5, 1.0, 5.0])):  # TRL's form, and verl's
        losses = clipped_weight_loss(log_probs, torch.zeros(3), torch.full((3,), 2.0), low, 4.0).loss
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        assert gradient.tolist() == pytest.approx([-2 * weight for weight in weights])


LOSSES: dict[str, Callable[..., Any]] = {
    "value": lambda now, old, target: clipped_value_loss(now, old, target, 0.3),
    "value, a wide clip": lambda now, old, target: clipped_value_loss(now, old, target, 10.0),
    "ratio": lambda now, old, target: clipped_ratio_loss(now, old, target, 0.2, 0.28),
    "dual clip": lambda now, old, target: clipped_ratio_loss(now, old, target, 0.2, 0.28, 3.0),
    "sequence": lambda now, old, target: sequence_ratio_loss(now, old, target, torch.arange(len(now)), 0.2, 0.2),
}


@dtypes
@pytest.mark.parametrize("name", LOSSES)
def test_a_token_counts_as_clipped_if_and_only_if_it_has_no_gradient(name: str, dtype: torch.dtype) -> None:
    now, old, target = torch.randn(3, 10_000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = LOSSES[name](now.requires_grad_(), old, target)
    loss, clipped = found if isinstance(found, tuple) else (found.loss, found.clipped_low | found.clipped_high)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    assert torch.equal(clipped, gradient == 0)
    assert clipped.any() != ("wide" in name)


# --- KL and corrections -----------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl(dtype: torch.dtype, name: str) -> None:
    new = torch.tensor(DIFFERENCES, dtype=dtype, requires_grad=True)
    agree(KL_ESTIMATORS[name](new, torch.zeros_like(new)), new, [reference.KLS[name](d) for d in DIFFERENCES])


def test_kl_by_hand() -> None:
    """The policy gives the token 1/2, the other 1: k3 has e^d = 2, so 2 - ln 2 - 1; the reverse 1/2 + ln 2 - 1."""
    half, one = tensor([0.5]).double().log(), torch.zeros(1).double()
    found = [estimate(half, one).item() for estimate in (k1, k2, k3)] + [k3(one, half).item(), k3(half, half).item()]
    ln2 = math.log(2)
    assert found == pytest.approx([-ln2, ln2**2 / 2, 1 - ln2, ln2 - 0.5, 0.0], abs=1e-12)
    assert k3(torch.zeros(1), tensor([1e-3])).item() == pytest.approx(5.0016671e-7, rel=1e-3), "digits near 0"
    policy, other = tensor([0.7, 0.2, 0.1], dtype=torch.float64), tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (policy * (policy / other).log()).sum()
    assert (policy * k3(policy.log(), other.log())).sum().item() == pytest.approx(exact.item(), abs=1e-12), "unbiased"


@dtypes
def test_corrections(dtype: torch.dtype) -> None:
    old = torch.tensor(DIFFERENCES, dtype=dtype, requires_grad=True)
    rollout, weights = torch.zeros_like(old), [math.exp(reference.held(d)[0]) for d in DIFFERENCES]
    below = [weight if weight <= 3.0 else 0.0 for weight in weights]
    one_token = torch.arange(len(old))  # then the product is the mean
    for found, expected in (
        (truncated_importance_weight(old, rollout, 2.0), [min(weight, 2.0) for weight in weights]),
        (masked_importance_weight(old, rollout, 0.5, 5.0), [w if 0.5 <= w <= 5.0 else 0.0 for w in weights]),
        (masked_sequence_weight(old, rollout, one_token, 3.0, False), below),
        (masked_sequence_weight(old, rollout, one_token, 3.0, True), below),
    ):
        assert not found.requires_grad and found.tolist() == pytest.approx(expected, rel=TOLERANCE[dtype])
    # Differences 1, 2 and -2.5 make the product e^0.5 and the geometric mean e^(1/6).
    old, sequences = torch.tensor([1.0, 2.0, -2.5, 9.0], dtype=dtype), tensor([0, 0, 0, 1])
    for geometric, weight in ((False, math.exp(0.5)), (True, math.exp(0.5 / 3))):
        found = masked_sequence_weight(old, torch.zeros_like(old), sequences, 3.0, geometric)
        assert found.tolist() == pytest.approx([weight, weight, weight, 0.0], rel=TOLERANCE[dtype])


def test_no_tokens_is_no_loss() -> None:
    empty = torch.zeros(0, requires_grad=True)
    assert clipped_ratio_loss(empty, empty.detach(), empty.detach(), 0.2, 0.2).loss.sum() == 0
    assert k3(empty, empty).sum() == 0


# --- Advantages -------------------------------------------------------------------------------------------------------


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    return group_normalized(rewards, groups, 1e-4)


ESTIMATES = {grpo: reference.normalized, group_centered: reference.centered, leave_one_out: reference.leave_one_out}


@pytest.mark.parametrize(
    ("estimate", "rewards", "expected"),
    [
        # Mean 1/2, unbiased variance (4 * 1/4) / 3 = 1/3, std 0.577350269...
        (grpo, [1.0, 0.0, 0.0, 1.0], [0.8658754, -0.8658754, -0.8658754, 0.8658754]),
        (group_centered, [3.0, 0.0, 0.0], [2.0, -1.0, -1.0]),
        (leave_one_out, [3.0, 0.0, 0.0], [3.0, -1.5, -1.5]),  # the others' means: of 0 0 it is 0, of 3 0 it is 1.5
    ],
)
def test_advantages_by_hand(estimate: Callable[..., Tensor], rewards: list[float], expected: list[float]) -> None:
    assert estimate(tensor(rewards), torch.zeros(len(rewards)).long()).tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_advantages(estimate: Callable[..., Tensor], scale: float) -> None:
    """Of groups of several sizes; a group of one has none, and equal rewards have none whatever the rounding."""
    groups = [[3.0, -1.0, 0.5, 0.5], [7.0], [0.1, 0.7], [0.1] * 7]
    rewards = tensor([scale * reward for group in groups for reward in group], dtype=torch.float64)
    numbers = torch.repeat_interleave(torch.arange(4), tensor([len(group) for group in groups]))
    expected = [a for group in groups[:3] for a in ESTIMATES[estimate]([scale * r for r in group])]
    found = estimate(rewards, numbers)
    assert found[:7].tolist() == pytest.approx(expected, rel=1e-9, abs=0.0)
    assert not found[7:].any() and not group_std(rewards, numbers)[[1, 3]].any()


def test_rewards_in_bf16_lose_nothing_more() -> None:
    rewards = tensor([0.1, 0.7, 1.0, -3.3]).bfloat16()
    found = grpo(rewards, torch.zeros(4).long())
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(reference.normalized([float(r) for r in rewards]), rel=1e-12)


# --- Returns, values --------------------------------------------------------------------------------------------------


def test_rewards_of_tokens_and_returns() -> None:
    penalties = tensor([0.1, 9.0, 0.2, 0.3, 0.4]).double()
    rewards = token_rewards(tensor([1.0, -2.0]), penalties, MASK, ROWS)
    assert rewards.tolist() == pytest.approx([-0.1, 0.0, 0.8, -0.3, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=1.0).tolist() == pytest.approx([0.7, 0.0, 0.8, -2.7, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=0.5).tolist() == pytest.approx([0.3, 0.0, 0.8, -1.5, -2.4])


def test_gae() -> None:
    # gamma 0.9, lambda 0.5; last tokens: r - V. First of each: (r + 0.9 V' - V) + 0.45 A'.
    rewards, values = (
        torch.tensor(row, dtype=torch.float64) for row in ([0.0, 0.0, 1.0, 0.0, 2.0], [0.2, 7.0, 0.4, 0.5, 1.0])
    )
    found = generalized_advantages(rewards, values, MASK, ROWS, gamma=0.9, gae_lambda=0.5).tolist()
    assert found == pytest.approx([0.16 + 0.45 * 0.6, 0.0, 0.6, 0.4 + 0.45 * 1.0, 1.0], abs=1e-9)
    trained = [index for index, kept in enumerate(MASK) if kept]
    for completion in (trained[:2], trained[2:]):
        pairs = rewards[completion].tolist(), values[completion].tolist()
        assert [found[i] for i in completion] == pytest.approx(reference.gae(*pairs, 0.9, 0.5), abs=1e-9)


def test_gae_of_completions_of_length_one_and_of_none() -> None:
    """Completion 0 has one trained token, 1 none, 2 two of which the first is far from its value."""
    mask, rows = tensor([True, False, False, True, True]), tensor([0, 1, 1, 2, 2])
    rewards, values = tensor([2.0, 9.0, 9.0, 0.0, -1.0]), tensor([0.5, 7.0, 7.0, 1e6, 0.25])
    found = generalized_advantages(rewards, values, mask, rows, gamma=1.0, gae_lambda=0.95)
    assert found.tolist() == pytest.approx([1.5, 0.0, 0.0, 0.25 - 1e6 + 0.95 * -1.25, -1.25], rel=1e-12)


def test_whitening() -> None:
    # Trained 1 2 3 4: mean 2.5, unbiased variance 5/3.
    found = whitened(tensor([1.0, 99.0, 2.0, 3.0, 4.0]), MASK).tolist()
    by_hand = [x / math.sqrt(5 / 3 + 1e-8) for x in (-1.5, 0.0, -0.5, 0.5, 1.5)]
    assert found == pytest.approx(by_hand)
    assert [found[0], *found[2:]] == pytest.approx(reference.whitened([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e30, 1e-30])
def test_whitening_without_variance_is_zero(value: float) -> None:
    for mask in (MASK, tensor([True, False, False, False, False])):
        assert not whitened(torch.full((5,), value, dtype=torch.float64), mask).any()


def test_nothing_trained_has_no_advantage() -> None:
    none = torch.zeros(5).bool()
    assert not generalized_advantages(torch.ones(5), torch.ones(5), none, ROWS, 1.0, 1.0).any()
    assert not whitened(torch.ones(5), none).any()
    assert not token_rewards(tensor([1.0, 1.0]), torch.ones(5), none, ROWS).any()


def test_a_value_loss_by_hand() -> None:
    """Within the bound; beyond it and nearer the return: the bounded one counts, without gradient; and farther."""
    values = tensor([1.1, 2.0, 0.0], requires_grad=True)
    losses, clipped = clipped_value_loss(values, torch.ones(3), torch.full((3,), 2.0), clip=0.2)
    agree(losses, values, [(0.405, -0.9), (0.32, 0.0), (2.0, -2.0)])
    assert clipped.tolist() == [False, True, False]
    free, _ = clipped_value_loss(values, torch.ones(3), torch.full((3,), 2.0), clip=0.0)
    assert free.tolist() == pytest.approx([0.405, 0.0, 2.0])


@dtypes
def test_value_losses(dtype: torch.dtype) -> None:
    """Values far off, on both sides of the return, and clips that act and do not."""
    cases = [(v, o, r) for v in (-1e4, -0.1, 0.0, 0.1, 1e4) for o in (-1.0, 0.0, 1.0) for r in (-5.0, 0.0, 5.0)]
    values, old, returns = (torch.tensor(column, dtype=dtype) for column in zip(*cases, strict=True))
    losses, _ = clipped_value_loss(values.requires_grad_(), old, returns, 0.2)
    agree(losses, values, [reference.value_loss(*case, 0.2) for case in cases])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain(value: float) -> None:
    for count in range(1, 100):
        returns = torch.full((count,), value, dtype=torch.float64) + 1e-16 * value * (torch.arange(count) % 3 - 1)
        metrics = target_metrics(torch.ones(count).bool(), torch.linspace(0, 1, count).double(), returns)
        assert metrics["value_explained_variance"] == 0.0


# --- The weights of tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0]),
        ("sequence-mean-token-mean", [1 / 2, 1 / 6, 1 / 6, 0, 1 / 6, 0, 0]),
        ("sequence-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0, 0]),
        ("constant", [1 / 40, 1 / 40, 1 / 40, 0, 1 / 40, 0, 0]),
    ],
)
def test_weights_of_tokens_by_hand(name: str, expected: list[float]) -> None:
    """Completions of 1 and 3 trained tokens, one fully masked, one empty; and nothing trained at all."""
    mask, rows = tensor([1, 1, 1, 0, 1, 0, 0]).bool(), tensor([0, 1, 1, 1, 1, 2, 2])
    assert token_weights(name, mask, rows, completions=4, length=10).tolist() == pytest.approx(expected, abs=1e-15)
    assert not token_weights(name, torch.zeros(7).bool(), rows, completions=4, length=10).any()
    with pytest.raises(ValueError, match="aggregation: got 'mean'"):
        token_weights("mean", mask, rows, completions=4, length=10)
