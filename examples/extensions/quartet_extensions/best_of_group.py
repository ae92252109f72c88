"""An algorithm: learn only from the best completions of each group (RAFT, Dong et al. 2023, arXiv:2304.06767).

With an advantage of 1 for a group's best completions and 0 for the others, the clipped policy gradient is maximum
likelihood on the best, within the clip range. A group with equal rewards contributes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from quartet_trainer.algorithms import ClippedRatio

if TYPE_CHECKING:
    from torch import Tensor  # the module is imported to check a run file; what needs torch imports it itself


class BestOfGroup(ClippedRatio):
    """The best completions of each group alone. The entry point names this class."""

    name: Literal["best_of_group"] = "best_of_group"
    margin: float = Field(0.0, ge=0, description="How far from the best reward of its group a completion may be.")

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return 1 for completions within `margin` of their group's best, if best and worst differ by more; else 0."""
        empty = rewards.new_zeros(int(groups.max()) + 1)
        highest = empty.scatter_reduce(0, groups, rewards, "amax", include_self=False)[groups]
        lowest = empty.scatter_reduce(0, groups, rewards, "amin", include_self=False)[groups]
        return ((rewards >= highest - self.margin) & (highest - lowest > self.margin)).to(rewards.dtype)
