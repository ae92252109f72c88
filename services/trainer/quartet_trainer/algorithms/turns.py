"""The turns of the policy in a batch, for advantages by turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """The U turns of the policy in a group or a batch, one completion's after another's."""

    of_token: Tensor
    """int64 [T]: the turn of each completion token, not decreasing; inserted tokens belong to the turn after them, or
    to the last of their row."""
    completions: Tensor
    """int64 [U]: the completion of each turn, not decreasing."""
    indices: Tensor
    """int64 [U]: its position among those of its completion, in the order of time, from 0."""
    states: Tensor
    """int64 [U]: the same number where the policy had read the same tokens, in one group and seat."""
    rewards: Tensor
    """float64 [U]: its own reward."""
    outcomes: Tensor
    """float64 [C]: the completions' rewards without those of turns."""

    def returns(self, discount: float) -> Tensor:
        """Rewards of each turn and of those after it, discounted per turn, float64 [U]; the outcome is the last's."""
        returns = torch.zeros(self.rewards.shape, dtype=torch.float64)
        following = self.outcomes.clone()
        order = torch.argsort(self.indices, descending=True, stable=True)
        last = torch.zeros(self.outcomes.shape, dtype=torch.int64)
        last.scatter_reduce_(0, self.completions, self.indices, "amax")
        for turn in order.split(torch.unique_consecutive(self.indices[order], return_counts=True)[1].tolist()):
            of = self.completions[turn]  # of one index: each completion at most once
            later = torch.where(self.indices[turn] == last[of], following[of], discount * following[of])
            returns[turn] = following[of] = self.rewards[turn] + later
        return returns
