"""MaxRL: GRPO's surrogate with an advantage that follows the likelihood of success."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from quartet_trainer.algorithms.base import ClippedRatio

if TYPE_CHECKING:
    from torch import Tensor


def relative_to_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """(r - mean) / mean of the group, [N]; 0 where the mean is not positive. Shapes as in `advantages`."""
    from quartet_trainer.algorithms.advantages import group_centered, group_mean

    mean = group_mean(rewards, groups)[groups]
    return (group_centered(rewards, groups) / mean).where(mean > 0, 0.0)


class MaxRL(ClippedRatio):
    """MaxRL: A = (r - mean) / mean of the group, 0 without a success (Tajwar et al. 2026, arXiv:2602.02710).

    A prompt's gradient is that of its log-likelihood of success, up to the order of the group's size, where that of
    the expected reward has the likelihood itself: hard prompts weigh more. Rewards are meant to be 0 or 1; a group
    whose mean is 0 or below has no advantage.

    >>> advantages([1, 0, 0, 0], [1, 1], [0, 0])
    [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    """

    name: Literal["max_rl"] = "max_rl"

    @model_validator(mode="after")
    def _rewards_are_not_shifted(self) -> Self:
        if self.kl_in == "reward":
            raise ValueError(
                'kl_in: max_rl divides by the mean reward, which a KL would make negative; allowed: "loss"'
            )
        return self

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return relative_to_mean(rewards, groups)
