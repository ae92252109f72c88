"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155).

The reward of a token is -kl_coefficient * KL, and at the end of the completion its reward, held within +-5, is added.
A batch whose mean ratio is above 20 changes no weight of the policy. The critic is `quartet_trainer.learner.critic`.
"""

from __future__ import annotations

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored
from quartet_trainer.algorithms.parts import clipped, compose
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.losses.returns import generalized_advantages, token_rewards, whitened


def ppo(settings: LearnerSettings) -> Algorithm:
    """Advantages by GAE, whitened; returns are advantages + values before the whitening."""

    def advantages(scored: Scored) -> Estimate:
        rewards = token_rewards(scored.rewards, scored.kl_penalty, scored.mask, scored.rows)
        estimated = generalized_advantages(
            rewards, scored.values, scored.mask, scored.rows, settings.gamma, settings.gae_lambda
        )
        return Estimate(whitened(estimated, scored.mask), returns=estimated + scored.values)

    return compose(
        settings,
        name="ppo",
        advantages=advantages,
        policy_loss=clipped(settings),
        aggregation="token-mean",
        kl_estimator="k1",
        kl_in="reward",
        reward_clip=5.0,
        max_mean_ratio=20.0,
        has_critic=True,
    )
