"""Advantages against hand-worked numbers and a plain loop over groups."""

from __future__ import annotations

import statistics

import pytest
import torch

from quartet_trainer.losses.advantages import group_centered, group_normalized, group_std, leave_one_out


def test_grpo_by_hand() -> None:
    # Rewards 1 0 0 1: mean 1/2, unbiased variance (4 * 1/4) / 3 = 1/3, std 0.577350269…
    advantages = group_normalized(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4).long(), epsilon=1e-4)
    expected = 0.5 / (3**-0.5 + 1e-4)
    assert advantages.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)
    assert expected == pytest.approx(0.8658754)


def test_dr_grpo_by_hand() -> None:
    advantages = group_centered(torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3).long())
    assert advantages.tolist() == [2.0, -1.0, -1.0]


def test_rloo_by_hand() -> None:
    # The others' means: of 0 0 it is 0, of 3 0 it is 1.5.
    advantages = leave_one_out(torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3).long())
    assert advantages.tolist() == [3.0, -1.5, -1.5]


def test_a_group_of_one_has_none() -> None:
    rewards, groups = torch.tensor([7.0, 1.0, 3.0]), torch.tensor([0, 1, 1])
    for estimate in (lambda r, g: group_normalized(r, g, 1e-4), group_centered, leave_one_out):
        advantages = estimate(rewards, groups)
        assert advantages[0] == 0.0
        assert advantages[1] == -advantages[2] != 0.0


def test_equal_rewards_give_exactly_zero_whatever_the_rounding() -> None:
    rewards, groups = torch.full((7,), 0.1), torch.zeros(7).long()  # the mean of seven 0.1 is not 0.1
    for estimate in (lambda r, g: group_normalized(r, g, 1e-4), group_centered, leave_one_out, group_std):
        assert (estimate(rewards, groups) == 0).all()


def test_against_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [2, 5, 8, 3]
    rewards = torch.randn(sum(sizes), generator=generator)
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    normalized, centered, left_out = (
        group_normalized(rewards, groups, 1e-6),
        group_centered(rewards, groups),
        leave_one_out(rewards, groups),
    )
    begin = 0
    for size in sizes:
        values = rewards[begin : begin + size].double().tolist()
        mean, std = statistics.fmean(values), statistics.stdev(values)
        for offset, value in enumerate(values):
            others = statistics.fmean(values[:offset] + values[offset + 1 :])
            assert normalized[begin + offset].item() == pytest.approx((value - mean) / (std + 1e-6), abs=1e-9)
            assert centered[begin + offset].item() == pytest.approx(value - mean, abs=1e-9)
            assert left_out[begin + offset].item() == pytest.approx(value - others, abs=1e-9)
        begin += size
