"""The weights of tokens, by hand: two completions of 1 and 3 trained tokens, one fully masked, one empty."""

from __future__ import annotations

import pytest
import torch

from quartet_trainer.losses.aggregation import token_weights

MASK = torch.tensor([1, 1, 1, 0, 1, 0, 0]).bool()
ROWS = torch.tensor([0, 1, 1, 1, 1, 2, 2])  # completion 3 has no token


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0]),
        ("sequence-mean-token-mean", [1 / 2, 1 / 6, 1 / 6, 0, 1 / 6, 0, 0]),
        ("sequence-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0, 0]),
        ("constant", [1 / 40, 1 / 40, 1 / 40, 0, 1 / 40, 0, 0]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    weights = token_weights(name, MASK, ROWS, completions=4, length=10)
    assert weights.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("name", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"])
def test_nothing_trained_is_weight_zero_and_no_division_by_it(name: str) -> None:
    assert (token_weights(name, torch.zeros(7).bool(), ROWS, completions=4, length=10) == 0).all()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="aggregation: got 'mean'"):
        token_weights("mean", MASK, ROWS, completions=4, length=10)
