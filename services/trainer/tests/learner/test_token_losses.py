"""The policy loss, the KL and the correction: by hand, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch

from quartet_trainer.losses.correction import truncated_importance_weight
from quartet_trainer.losses.kl import k3
from quartet_trainer.losses.policy import clipped_ratio_loss


def loss_of(ratio: float, advantage: float) -> tuple[float, float, bool, bool]:
    """Loss, gradient with respect to the log-prob, and the two clip flags; bounds 0.8 and 1.28."""
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    tokens = clipped_ratio_loss(log_probs, old, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.28)
    (gradient,) = torch.autograd.grad(tokens.loss.sum(), log_probs)
    return tokens.loss.item(), gradient.item(), bool(tokens.clipped_low), bool(tokens.clipped_high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),  # on policy: the gradient is -A
        (1.1, 2.0, -2.2, -2.2, False, False),
        (1.5, 2.0, -2.56, 0.0, False, True),  # a good token, probable enough already: -1.28 A, no gradient
        (0.5, 2.0, -1.0, -1.0, False, False),  # a good token grown improbable still counts
        (0.5, -2.0, 1.6, 0.0, True, False),  # a bad token, improbable enough already: -0.8 A, no gradient
        (1.5, -2.0, 3.0, 3.0, False, False),  # a bad token grown probable still counts
        (1.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_clipped_ratio_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool
) -> None:
    assert loss_of(ratio, advantage) == (
        pytest.approx(loss, abs=1e-12),
        pytest.approx(gradient, abs=1e-12),
        low,
        high,
    )


@pytest.mark.parametrize("difference", [-3000.0, 3000.0])
@pytest.mark.parametrize("advantage", [-5.0, 5.0])
def test_huge_ratios_stay_finite(difference: float, advantage: float) -> None:
    log_probs = torch.tensor([difference], requires_grad=True)
    tokens = clipped_ratio_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    total = tokens.loss.sum() + k3(log_probs, torch.zeros(1)).sum()
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(log_probs.grad).all()


def test_no_tokens_is_no_loss() -> None:
    empty = torch.zeros(0, requires_grad=True)
    assert clipped_ratio_loss(empty, empty.detach(), empty.detach(), 0.2, 0.2).loss.sum() == 0
    assert k3(empty, empty).sum() == 0


def test_k3_by_hand() -> None:
    # The policy gives the token 1/2, the other 1: e^d = 2, so 2 - ln 2 - 1; the other way round 1/2 + ln 2 - 1.
    half, one = torch.tensor([math.log(0.5)], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert k3(half, one).item() == pytest.approx(1 - math.log(2), abs=1e-12)
    assert k3(one, half).item() == pytest.approx(math.log(2) - 0.5, abs=1e-12)
    assert k3(half, half).item() == 0.0


def test_k3_is_unbiased_for_the_kl() -> None:
    policy, other = (torch.tensor(p, dtype=torch.float64) for p in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.4]))
    expected = (policy * (policy / other).log()).sum()
    estimate = (policy * k3(policy.log(), other.log())).sum()
    assert estimate.item() == pytest.approx(expected.item(), abs=1e-12)


def test_k3_keeps_its_digits_where_policies_nearly_agree() -> None:
    difference = torch.tensor([1e-3])
    assert k3(torch.zeros(1), difference).item() == pytest.approx(5.0016671e-7, rel=1e-3)


def test_truncated_importance_weight_by_hand() -> None:
    old = torch.tensor([1.0, 2.0, 10.0, 0.5]).log().requires_grad_()
    weights = truncated_importance_weight(old, torch.zeros(4), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 2.0, 0.5])
    assert not weights.requires_grad
