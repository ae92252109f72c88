"""GSPO: one ratio a completion, the geometric mean of its tokens' (Zheng et al. 2025, arXiv:2507.18071)."""

from __future__ import annotations

from functools import partial

from quartet_trainer.algorithms.base import Algorithm
from quartet_trainer.algorithms.parts import compose, of_completions, ratio_bounds
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_normalized
from quartet_trainer.losses.policy import sequence_ratio_loss


def gspo(settings: LearnerSettings) -> Algorithm:
    """The paper's bounds, 3e-4 and 4e-4: a mean of log-ratios is far nearer to 0 than each of them.

    They hold for ratios to the policy just before the step, so `old_log_probs` is "recompute" unless the user says not.
    """
    return compose(
        settings,
        name="gspo",
        advantages=of_completions(lambda rewards, groups: group_normalized(rewards, groups, settings.std_epsilon)),
        policy_loss=partial(sequence_ratio_loss, **ratio_bounds(settings, clip_low=3e-4, clip_high=4e-4)),
        aggregation="sequence-mean-token-mean",
    )
