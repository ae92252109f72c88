"""An algorithm: learn only from the best completions of each group (RAFT, Dong et al. 2023, arXiv:2304.06767).

With an advantage of 1 for a group's best completions and 0 for the others, the clipped policy gradient is maximum
likelihood on the best, within the clip range. A group with equal rewards contributes nothing.
"""

import torch

from quartet_trainer.algorithms import Algorithm
from quartet_trainer.algorithms.parts import clipped, compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings


def best_of_group(settings: LearnerSettings) -> Algorithm:
    """Return the algorithm for the settings of `[trainer]`. The entry point names this function."""
    margin = float(settings.algorithm_parameters.get("margin", 0.0))
    return compose(
        settings,
        name="best_of_group",
        advantages=of_completions(lambda rewards, groups: best(rewards, groups, margin)),
        policy_loss=clipped(settings),
        aggregation="token-mean",
    )


def best(rewards: torch.Tensor, groups: torch.Tensor, margin: float = 0.0) -> torch.Tensor:
    """Return 1 for completions within `margin` of their group's best, if best and worst differ by more; else 0.

    Args:
        rewards: float64 [N].
        groups: int64 [N], the group of each completion.
    """
    count = int(groups.max()) + 1
    empty = torch.zeros(count, dtype=rewards.dtype)
    highest = empty.scatter_reduce(0, groups, rewards, "amax", include_self=False)[groups]
    lowest = empty.scatter_reduce(0, groups, rewards, "amin", include_self=False)[groups]
    return ((rewards >= highest - margin) & (highest - lowest > margin)).to(rewards.dtype)
