"""DAPO's loss: clip-higher, token-mean, truncated completions masked (Yu et al. 2025, arXiv:2503.14476).

Its dynamic sampling, groups of zero variance replaced by others before they get here, is `quartet_trainer.
dynamic_sampling`, on by default with this algorithm; those that are left count in the denominator. Its soft length
penalty is not built.
"""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import clipped
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized


def dapo(settings: LearnerSettings) -> Algorithm:
    """GRPO's advantage; ratio clipped to [0.8, 1.28]."""
    return Algorithm(
        name="dapo",
        advantages=lambda batch: batch.per_token(group_normalized(batch.rewards, batch.groups, settings.std_epsilon)),
        policy_loss=clipped(settings, clip_high=0.28),
        aggregation=settings.aggregation or "token-mean",
        mask_truncated=settings.mask_truncated is not False,
    )
