"""PPO's value head: one more output of the policy's own trunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Linear):
    """A linear layer from the policy's hidden states to one number, which starts at 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Make it for states of that size, with weights of that dtype."""
        super().__init__(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From states [t, H] to values [t]; in float32, or float64 for those of a float64 model.

        Values differ by less than bf16 can tell apart, so it is no matrix product that `precision` has a say in.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)
