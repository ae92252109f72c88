"""REINFORCE++-baseline: the group's mean as baseline, whitened over the batch's tokens (Hu 2025, arXiv:2501.03262).

ColossalChat calls it REINFORCE_PPB and takes the KL from each token's advantage before whitening: `kl_in = "reward"`
does that. (It then multiplies by the standard deviation where whitening divides by it.)
"""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored
from quartet_trainer.algorithms.parts import clipped, compose
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.advantages import group_centered
from quartet_trainer.losses.returns import whitened


def reinforce_pp_baseline(settings: LearnerSettings) -> Algorithm:
    """The k2 KL is in the loss by default."""

    def advantages(scored: Scored) -> Estimate:
        centered = group_centered(scored.rewards, scored.groups)[scored.rows]
        return Estimate(whitened(centered - scored.kl_penalty, scored.mask))

    return compose(
        settings,
        name="reinforce_pp_baseline",
        advantages=advantages,
        policy_loss=clipped(settings),
        aggregation="token-mean",
        kl_estimator="k2",
    )
