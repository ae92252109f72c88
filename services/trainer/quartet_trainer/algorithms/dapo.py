"""DAPO: clip-higher, token-mean, truncated completions masked (Yu et al. 2025, arXiv:2503.14476).

Its dynamic sampling, groups of zero variance replaced by others before they get here, is `quartet_trainer.
dynamic_sampling`, on by default with this algorithm; those that are left count in the denominator. Its soft length
penalty is part of the reward: the reward service's verifier `length`.
"""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped, compose, of_completions
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized


def dapo(settings: LearnerSettings) -> Algorithm:
    """GRPO's advantage; ratio clipped to [0.8, 1.28]."""
    return compose(
        settings,
        name="dapo",
        advantages=of_completions(lambda rewards, groups: group_normalized(rewards, groups, settings.std_epsilon)),
        policy_loss=clipped(settings, clip_high=0.28),
        aggregation="token-mean",
        mask_truncated=True,
    )
