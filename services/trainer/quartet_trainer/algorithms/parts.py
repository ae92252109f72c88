"""The parts most algorithms share, with the user's settings filled in."""

from __future__ import annotations

from functools import partial

from quartet_trainer.algorithms.base import PolicyLoss
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.policy import clipped_ratio_loss


def clipped(settings: LearnerSettings, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """PPO's clipped ratio, with these bounds unless the user gave others."""
    return partial(
        clipped_ratio_loss,
        clip_low=clip_low if settings.clip_low is None else settings.clip_low,
        clip_high=clip_high if settings.clip_high is None else settings.clip_high,
    )
