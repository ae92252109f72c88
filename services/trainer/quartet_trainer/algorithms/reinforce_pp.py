"""REINFORCE++: no groups and no critic; returns of tokens, whitened over the batch (Hu 2025, arXiv:2501.03262)."""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored
from quartet_trainer.algorithms.parts import clipped, compose
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.returns import returns_to_go, token_rewards, whitened


def reinforce_pp(settings: LearnerSettings) -> Algorithm:
    """The k1 KL is taken from each token's reward; the completion's reward comes at its last token."""

    def advantages(scored: Scored) -> Estimate:
        rewards = token_rewards(scored.rewards, scored.kl_penalty, scored.mask, scored.rows)
        returns = returns_to_go(rewards, scored.mask, scored.rows, settings.gamma)
        return Estimate(whitened(returns, scored.mask))

    return compose(
        settings,
        name="reinforce_pp",
        advantages=advantages,
        policy_loss=clipped(settings),
        aggregation="token-mean",
        kl_estimator="k1",
        kl_in="reward",
    )
