"""Returns, GAE, whitening, the value loss, dual clip, CISPO, KL estimators: by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from quartet_trainer.learner.metrics import target_metrics
from quartet_trainer.losses.kl import k1, k2
from quartet_trainer.losses.policy import TokenLosses, clipped_ratio_loss, clipped_weight_loss, sequence_ratio_loss
from quartet_trainer.losses.returns import generalized_advantages, returns_to_go, token_rewards, whitened
from quartet_trainer.losses.value import clipped_value_loss

# Two completions of three and two tokens; the second token of the first is not trained.
ROWS, MASK = tensor([0, 0, 0, 1, 1]), tensor([True, False, True, True, True])


def test_rewards_of_tokens_and_returns() -> None:
    penalties = tensor([0.1, 9.0, 0.2, 0.3, 0.4]).double()
    rewards = token_rewards(tensor([1.0, -2.0]), penalties, MASK, ROWS)
    assert rewards.tolist() == pytest.approx([-0.1, 0.0, 0.8, -0.3, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=1.0).tolist() == pytest.approx([0.7, 0.0, 0.8, -2.7, -2.4])
    assert returns_to_go(rewards, MASK, ROWS, gamma=0.5).tolist() == pytest.approx([0.3, 0.0, 0.8, -1.5, -2.4])


def test_gae_by_hand() -> None:
    # gamma 0.9, lambda 0.5; last tokens: r - V. First of each: (r + 0.9 V' - V) + 0.45 A'.
    rewards, values = tensor([0.0, 0.0, 1.0, 0.0, 2.0]), tensor([0.2, 7.0, 0.4, 0.5, 1.0])
    found = generalized_advantages(rewards, values, MASK, ROWS, gamma=0.9, gae_lambda=0.5)
    assert found.tolist() == pytest.approx([0.16 + 0.45 * 0.6, 0.0, 0.6, 0.4 + 0.45 * 1.0, 1.0], abs=1e-6)


def test_nothing_trained_and_a_completion_of_one_token() -> None:
    none = torch.zeros(5).bool()
    assert not generalized_advantages(torch.ones(5), torch.ones(5), none, ROWS, 1.0, 1.0).any()
    assert not whitened(torch.ones(5), none).any()
    assert not token_rewards(tensor([1.0, 1.0]), torch.ones(5), none, ROWS).any()
    assert generalized_advantages(tensor([3.0]), tensor([1.0]), tensor([True]), tensor([0]), 1.0, 1.0).tolist() == [2.0]


def test_whitening_by_hand() -> None:
    # Trained 1 2 3 4: mean 2.5, unbiased variance 5/3.
    found = whitened(tensor([1.0, 99.0, 2.0, 3.0, 4.0]), MASK)
    expected = [x / math.sqrt(5 / 3 + 1e-8) for x in (-1.5, 0.0, -0.5, 0.5, 1.5)]
    assert found.tolist() == pytest.approx(expected)
    assert not whitened(torch.full((5,), 0.1), MASK).any()


def test_value_loss_by_hand() -> None:
    # Within the bound; beyond it and nearer the return: the bounded one counts, without gradient; beyond and farther.
    values = tensor([1.1, 2.0, 0.0], requires_grad=True)
    losses, clipped = clipped_value_loss(values, tensor([1.0, 1.0, 1.0]), tensor([2.0, 2.0, 2.0]), clip=0.2)
    assert losses.tolist() == pytest.approx([0.405, 0.32, 2.0])
    assert clipped.tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, -2.0])
    free, _ = clipped_value_loss(values, torch.ones(3), torch.full((3,), 2.0), clip=0.0)
    assert free.tolist() == pytest.approx([0.405, 0.0, 2.0])


LOSSES = {
    "value": lambda now, old, target: clipped_value_loss(now, old, target, 0.3),
    "value, a wide clip": lambda now, old, target: clipped_value_loss(now, old, target, 10.0),
    "ratio": lambda now, old, target: as_pair(clipped_ratio_loss(now, old, target, 0.2, 0.28)),
    "dual clip": lambda now, old, target: as_pair(clipped_ratio_loss(now, old, target, 0.2, 0.28, 3.0)),
    "sequence": lambda now, old, target: as_pair(
        sequence_ratio_loss(now, old, target, torch.arange(len(now)), 0.2, 0.2)
    ),
}


def as_pair(tokens: TokenLosses) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.loss, tokens.clipped_low | tokens.clipped_high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_a_token_counts_as_clipped_if_and_only_if_it_has_no_gradient(name: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    now, old, target = torch.randn(3, 10_000, dtype=dtype, generator=random)
    loss, clipped = LOSSES[name](now.requires_grad_(), old, target)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    assert torch.equal(clipped, gradient == 0)
    assert clipped.any() != ("wide" in name)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain(value: float) -> None:
    for count in range(1, 100):
        returns = torch.full((count,), value, dtype=torch.float64) + 1e-16 * value * (torch.arange(count) % 3 - 1)
        metrics = target_metrics(torch.ones(count).bool(), torch.linspace(0, 1, count).double(), returns)
        assert metrics["value_explained_variance"] == 0.0


def test_dual_clip_at_ratios_of_a_half_one_and_ten() -> None:
    log_probs = tensor([0.5, 1.0, 10.0]).log().requires_grad_()
    tokens = clipped_ratio_loss(log_probs, torch.zeros(3), -torch.ones(3), 0.2, 0.2, dual_clip=3.0)
    assert tokens.loss.tolist() == pytest.approx([0.8, 1.0, 3.0])
    assert tokens.clipped_high.tolist() == [False, False, True]
    (gradient,) = torch.autograd.grad(tokens.loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    log_probs = tensor([0.1, 1.0, 10.0]).log().requires_grad_()
    for low, weights in ((None, [0.1, 1.0, 5.0]), (0.5, [0.5, 1.0, 5.0])):  # TRL's form, and verl's
        tokens = clipped_weight_loss(log_probs, torch.zeros(3), torch.full((3,), 2.0), low, 4.0)
        (gradient,) = torch.autograd.grad(tokens.loss.sum(), log_probs)
        assert gradient.tolist() == pytest.approx([-2 * weight for weight in weights])


def test_gspo_has_one_ratio_a_completion() -> None:
    # Ratios 2 and 8 of one completion: geometric mean 4. Mean of the tokens' losses: gradient 4 A / 2 for each.
    log_probs = tensor([2.0, 8.0, 1.0]).log().requires_grad_()
    tokens = sequence_ratio_loss(log_probs, torch.zeros(3), torch.ones(3), tensor([0, 0, 1]), 0.2, 9.0)
    assert tokens.loss.tolist() == pytest.approx([-4.0, -4.0, -1.0])
    (gradient,) = torch.autograd.grad(tokens.loss[:2].mean(), log_probs)
    assert gradient.tolist() == pytest.approx([-2.0, -2.0, 0.0])


def test_k1_and_k2_by_hand() -> None:
    half, one = tensor([0.5]).double().log(), torch.zeros(1).double()
    assert k1(half, one).item() == pytest.approx(-math.log(2))
    assert k2(half, one).item() == pytest.approx(math.log(2) ** 2 / 2)
