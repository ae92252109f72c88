"""Losses, KLs, corrections, advantages, returns and values: by hand, and over their whole range against `reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, tensor

from quartet_trainer.algorithms import read_algorithm
from quartet_trainer.algorithms.advantages import (
    generalized_advantages,
    group_centered,
    group_normalized,
    group_std,
    leave_one_out,
    returns_to_go,
    token_rewards,
    whitened,
)
from quartet_trainer.algorithms.dppo import DPPO
from quartet_trainer.algorithms.losses import (
    KL_ESTIMATORS,
    clipped_ratio_loss,
    clipped_value_loss,
    clipped_weight_loss,
    k3,
    masked_importance_weight,
    masked_sequence_weight,
    sequence_ratio_loss,
    token_weights,
    truncated_importance_weight,
)
from quartet_trainer.algorithms.max_rl import MaxRL, relative_to_mean
from quartet_trainer.algorithms.rloo import RLOOSequence
from quartet_trainer.learner.metrics import target_metrics

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


@dtypes
@pytest.mark.parametrize("dual", [0.0, 3.0])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_clipped_ratio_losses_equal_reference(dtype: torch.dtype, dual: float, of_sequences: bool) -> None:
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


@dtypes
def test_gspo_of_a_long_completion_of_huge_ratios(dtype: torch.dtype) -> None:
    """Ratios e^300 and e^-300 make 1; the gradient of each token is that of the mean, A r / n."""
    new = torch.tensor([300.0, -300.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    old, advantages = torch.zeros(4, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)
    agree(sequence_ratio_loss(new, old, advantages, torch.zeros(4).long(), 0.2, 0.2).loss / 4, new, [(-0.5, -0.5)] * 4)


NEW = [[-0.5, -1.2, -0.9, -2.0], [-1.0, -0.3, -2.2], [-0.7, -1.5], [-3.0, -0.2, -0.4, -1.1]]
OLD = [[-0.6, -1.3, -0.9, -1.9], [-1.4, -0.2, -2.5], [-0.4, -1.3], [-2.9, -0.3, -0.4, -1.1]]
ADVANTAGES = [1.5, -0.5, 0.25, -1.25]
OF_TRL: dict[str, tuple[float, list[list[float]]]] = {
    "rloo_sequence": (
        0.08791758953840595,
        [[-0.4144390942783677] * 4, [0.22776485004881353] * 3, [-0.03790816623203959] * 2, [0.3124999999999997] * 4],
    ),
    "gspo": (
        0.03200712563139757,
        [[-0.09612329254916521] * 4, [0.050891781590007075] * 3, [-0.024337524470981402] * 2, [0.078125] * 4],
    ),
}
"""Loss and gradient of `RLOOTrainer`, and of `GRPOTrainer` with importance_sampling_level "sequence" and loss_type
"grpo", of TRL 1.16 in float64, with epsilon 0.2, for these log-probs and advantages of completions."""


@pytest.mark.parametrize("name", OF_TRL)
def test_losses_of_completions_are_those_of_trl(name: str) -> None:
    lengths = tensor([len(tokens) for tokens in NEW])
    new, old = (tensor([lp for tokens in rows for lp in tokens], dtype=torch.float64) for rows in (NEW, OLD))
    sequences = torch.repeat_interleave(torch.arange(4), lengths)
    advantages = tensor(ADVANTAGES, dtype=torch.float64)[sequences]
    algorithm = read_algorithm({"name": name, "clip_low": 0.2, "clip_high": 0.2})
    losses = algorithm.policy_loss(new.requires_grad_(), old, advantages, sequences).loss
    weights = token_weights(algorithm.aggregation, torch.ones(13).bool(), sequences, completions=4, length=4)
    loss = (weights * losses).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    value, slopes = OF_TRL[name]
    assert loss.item() == pytest.approx(value, rel=1e-9)
    assert gradient.tolist() == pytest.approx([slope for row in slopes for slope in row], rel=1e-9)


@dtypes
def test_gspo_with_an_advantage_of_each_token(dtype: torch.dtype) -> None:
    """GSPO-token: sg(s) * pi / sg(pi), with s = exp((0.2 - 0.4) / 2), clipped by the sign of the token's advantage."""
    old, sequences = tensor([-1.0, -2.0], dtype=dtype), torch.zeros(2).long()
    new = (old + tensor([0.2, -0.4], dtype=dtype)).requires_grad_()
    s = math.exp(-0.1)
    found = sequence_ratio_loss(new, old, tensor([3.0, -0.5], dtype=dtype), sequences, 0.05, 0.05)
    agree(found.loss, new, [(-3.0 * s, -3.0 * s), (0.5 * 0.95, 0.0)])


@dtypes
def test_rloo_of_a_completion_of_huge_ratios(dtype: torch.dtype) -> None:
    """e^300 and e^-300 make 1, of which each token has its part; a product of e^400 is held at e^20, bounded by 3 A."""
    rloo = RLOOSequence(dual_clip=3.0)
    new = torch.tensor([300.0, -300.0, 0.0, 0.0, 250.0, 150.0], dtype=dtype, requires_grad=True)
    advantages, old = tensor([2.0] * 4 + [-1.0] * 2, dtype=dtype), torch.zeros(6, dtype=dtype)
    found = rloo.policy_loss(new, old, advantages, tensor([0, 0, 0, 0, 1, 1]))
    agree(found.loss, new, [(-0.5, -2.0)] * 4 + [(1.5, 0.0)] * 2)
    assert found.clipped_high.tolist() == [False] * 4 + [True] * 2


@dtypes
@pytest.mark.parametrize("values", [{}, {"divergence": "kl"}, {"clip_low": 0.02, "clip_high": 0.3}], ids=str)
def test_dppo_mask_equals_reference(dtype: torch.dtype, values: dict[str, Any]) -> None:
    """On likely and rare tokens, where a ratio and a divergence disagree, and at probabilities of 0 and 1."""
    probabilities = [1e-12, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.66, 0.9, 0.99, 1 - 1e-5]
    cases = [(p, q, a) for p in probabilities for q in probabilities for a in (-3.0, 0.0, 0.5)]
    old, new, advantages = (tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True))
    old, new = old.log().to(dtype), new.log().to(dtype).requires_grad_()
    found = DPPO(**values).policy_loss(new, old, advantages.to(dtype), torch.arange(len(cases)))
    kind = values.get("divergence", "tv")
    bounds = (values.get("clip_low", 0.05 if kind == "kl" else 0.15), values.get("clip_high", 0.15))
    bounds = (bounds[0], 0.05) if kind == "kl" else bounds
    each = zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    agree(found.loss, new, [reference.dppo(*case, kind, *bounds) for case in each])
    masked = found.clipped_low | found.clipped_high
    assert torch.equal(masked, (found.loss == 0) & (advantages != 0)) and masked.any() and not masked.all()
    assert not (found.clipped_low & (new > old)).any() and not (found.clipped_high & (new < old)).any()
    # Twice as likely, and still rare: PPO's clip would take the token's gradient, a divergence of 1e-4 does not.
    rare = DPPO(**values).policy_loss(tensor([2e-4]).log(), tensor([1e-4]).log(), tensor([1.0]), tensor([0]))
    assert not rare.clipped_high.any()
    certain = torch.zeros(1, dtype=dtype)  # a probability of 1, under one policy or both
    for pair in ((certain, certain), (certain, certain - 1), (certain - 1, certain)):
        assert DPPO(**values).policy_loss(*pair, torch.ones_like(certain), tensor([0])).loss.isfinite().all()


@dtypes
@pytest.mark.parametrize("low", [None, 0.5])
def test_cispo_loss_equals_reference(dtype: torch.dtype, low: float | None) -> None:
    """TRL's form, and verl's."""
    difference, advantages = torch.tensor(GRID, dtype=dtype).T.contiguous()
    old = torch.full_like(difference, -2.0)
    new = (old + difference).requires_grad_()
    losses = clipped_weight_loss(new, old, advantages, low, 4.0).loss
    agree(losses, new, [reference.cispo(d, a, -2.0 + d, 4.0, low) for d, a in GRID])


# --- KL and corrections -----------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimators_equal_reference(dtype: torch.dtype, name: str) -> None:
    new = torch.tensor(DIFFERENCES, dtype=dtype, requires_grad=True)
    agree(KL_ESTIMATORS[name](new, torch.zeros_like(new)), new, [reference.KLS[name](d) for d in DIFFERENCES])


def test_k3_keeps_its_digits_near_zero() -> None:
    assert k3(torch.zeros(1), tensor([1e-3])).item() == pytest.approx(5.0016671e-7, rel=1e-3)


@dtypes
def test_importance_corrections_equal_reference(dtype: torch.dtype) -> None:
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


# --- Advantages -------------------------------------------------------------------------------------------------------


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    return group_normalized(rewards, groups, 1e-4)


ESTIMATES = {
    grpo: reference.normalized,
    group_centered: reference.centered,
    leave_one_out: reference.leave_one_out,
    relative_to_mean: reference.relative_to_mean,
}


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_advantages_equal_reference(estimate: Callable[..., Tensor], scale: float) -> None:
    """Of groups of several sizes; a group of one has none, and equal rewards have none whatever the rounding."""
    groups = [[3.0, -1.0, 0.5, 0.5], [7.0], [0.1, 0.7], [0.1] * 7]
    rewards = tensor([scale * reward for group in groups for reward in group], dtype=torch.float64)
    numbers = torch.repeat_interleave(torch.arange(4), tensor([len(group) for group in groups]))
    expected = [a for group in groups[:3] for a in ESTIMATES[estimate]([scale * r for r in group])]
    found = estimate(rewards, numbers)
    assert found[:7].tolist() == pytest.approx(expected, rel=1e-9, abs=0.0)
    assert not found[7:].any() and not group_std(rewards, numbers)[[1, 3]].any()


@pytest.mark.parametrize("size", [2, 8, 64])
def test_advantages_of_max_rl_are_the_gradient_of_the_likelihood(size: int) -> None:
    """K successes of N: N - K over K, and -1 for a failure; nothing without a success, or below a mean of 0."""
    groups = [[1.0] * solved + [0.0] * (size - solved) for solved in range(size + 1)] + [[0.5, *[-1.0] * (size - 1)]]
    rewards = tensor([reward for group in groups for reward in group], dtype=torch.float64)
    found = MaxRL().completion_advantages(rewards, torch.arange(len(groups)).repeat_interleave(size))
    expected = [
        (size - solved) / solved if index < solved else -1.0 if solved else 0.0
        for solved in range(size + 1)
        for index in range(size)
    ]
    assert found.tolist() == pytest.approx(expected + [0.0] * size, rel=1e-12)


# --- Returns, values --------------------------------------------------------------------------------------------------


def test_gae_equals_reference() -> None:
    # gamma 0.9, lambda 0.5; last tokens: r - V. First of each: (r + 0.9 V' - V) + 0.45 A'.
    rewards, values = (
        torch.tensor(row, dtype=torch.float64) for row in ([0.0, 0.0, 1.0, 0.0, 2.0], [0.2, 7.0, 0.4, 0.5, 1.0])
    )
    found = generalized_advantages(rewards, values, MASK, ROWS, gamma=0.9, gae_lambda=0.5).tolist()
    assert found == pytest.approx([0.16 + 0.45 * 0.6, 0.0, 0.6, 0.4 + 0.45 * 1.0, 1.0], abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e30, 1e-30])
def test_whitening_without_variance_is_zero(value: float) -> None:
    for mask in (MASK, tensor([True, False, False, False, False])):
        assert not whitened(torch.full((5,), value, dtype=torch.float64), mask).any()


@dtypes
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_losses_equal_reference(dtype: torch.dtype, clip: float) -> None:
    """Values far off, on both sides of the return, and clips that act and do not."""
    cases = [(v, o, r) for v in (-1e4, -0.1, 0.0, 0.1, 1e4) for o in (-1.0, 0.0, 1.0) for r in (-5.0, 0.0, 5.0)]
    values, old, returns = (torch.tensor(column, dtype=dtype) for column in zip(*cases, strict=True))
    losses, _ = clipped_value_loss(values.requires_grad_(), old, returns, clip)
    agree(losses, values, [reference.value_loss(*case, clip) for case in cases])


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
    if not isinstance(found, tuple):
        assert not (found.clipped_low & (now > old)).any() and not (found.clipped_high & (now < old)).any()
    assert clipped.any() != ("wide" in name)


def test_rewards_of_tokens_and_returns() -> None:
    penalties = tensor([0.1, 9.0, 0.2, 0.3, 0.4]).double()
    rewards = token_rewards(tensor([1.0, -2.0]), penalties, MASK, ROWS)
    assert rewards.tolist() == pytest.approx([-0.1, 0.0, 0.8, -0.3, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=1.0).tolist() == pytest.approx([0.7, 0.0, 0.8, -2.7, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=0.5).tolist() == pytest.approx([0.3, 0.0, 0.8, -1.5, -2.4])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain(value: float) -> None:
    for count in range(1, 100):
        returns = torch.full((count,), value, dtype=torch.float64) + 1e-16 * value * (torch.arange(count) % 3 - 1)
        metrics = target_metrics(torch.ones(count).bool(), torch.linspace(0, 1, count).double(), returns)
        assert metrics["value_explained_variance"] == 0.0
