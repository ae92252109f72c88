"""The built-in algorithms, composed of their parts."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quartet_trainer.algorithms.advantages import (
    generalized_advantages,
    group_centered,
    group_normalized,
    leave_one_out,
    returns_to_go,
    token_rewards,
    whitened,
)
from quartet_trainer.algorithms.base import AdvantageEstimator, Algorithm, AlgorithmFactory, Estimate, Scored
from quartet_trainer.algorithms.losses import TokenLosses, clipped_weight_loss, sequence_ratio_loss
from quartet_trainer.algorithms.parts import clipped, compose, of_completions, ratio_bounds
from quartet_trainer.learner_settings import LearnerSettings


def _normalized(settings: LearnerSettings) -> AdvantageEstimator:
    return of_completions(lambda rewards, groups: group_normalized(rewards, groups, settings.std_epsilon))


def grpo(settings: LearnerSettings) -> Algorithm:
    """GRPO: rewards normalized within the group, clipped ratio (Shao et al. 2024, arXiv:2402.03300).

    The default aggregation is "token-mean", as in TRL and verl; the paper's is "sequence-mean-token-mean".
    """
    return compose(
        settings,
        name="grpo",
        advantages=_normalized(settings),
        policy_loss=clipped(settings),
        aggregation="token-mean",
    )


def dr_grpo(settings: LearnerSettings) -> Algorithm:
    """Dr. GRPO: GRPO without its two biases, the division by the std and that by the length (arXiv:2503.20783).

    The sum of losses is divided by completions * max_new_tokens, a constant.
    """
    return compose(
        settings,
        name="dr_grpo",
        advantages=of_completions(group_centered),
        policy_loss=clipped(settings),
        aggregation="constant",
    )


def dapo(settings: LearnerSettings) -> Algorithm:
    """DAPO: clip-higher, token-mean, truncated completions masked (Yu et al. 2025, arXiv:2503.14476).

    Its dynamic sampling is in `quartet_trainer.data` and on by default with this algorithm: groups of zero variance are
    replaced by others before they get here; those that remain count in the denominator. Its soft length penalty is part
    of the reward: the reward service's verifier `length`.
    """
    return compose(
        settings,
        name="dapo",
        advantages=_normalized(settings),
        policy_loss=clipped(settings, clip_high=0.28),
        aggregation="token-mean",
        mask_truncated=True,
    )


def rloo(settings: LearnerSettings) -> Algorithm:
    """RLOO: each completion's baseline is the mean reward of the others (Ahmadian et al. 2024, arXiv:2402.14740).

    The ratio is clipped per token; losses are summed over a completion, because the completion is the action.
    """
    return compose(
        settings,
        name="rloo",
        advantages=of_completions(leave_one_out),
        policy_loss=clipped(settings),
        aggregation="sequence-mean-token-sum",
    )


def reinforce_pp(settings: LearnerSettings) -> Algorithm:
    """REINFORCE++: no groups and no critic; token returns, whitened over the batch (Hu 2025, arXiv:2501.03262).

    The k1 KL is taken from each token's reward; the completion's reward is added at its last token.
    """

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


def reinforce_pp_baseline(settings: LearnerSettings) -> Algorithm:
    """REINFORCE++-baseline: the group's mean as baseline, whitened over the batch's tokens (Hu 2025, arXiv:2501.03262).

    The k2 KL is in the loss by default. ColossalChat calls it REINFORCE_PPB and takes the KL from each token's
    advantage before whitening: `kl_in = "reward"` does that. (It then multiplies by the standard deviation where
    whitening divides by it.)
    """

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


def gspo(settings: LearnerSettings) -> Algorithm:
    """GSPO: one ratio per completion, the geometric mean of its tokens' (Zheng et al. 2025, arXiv:2507.18071).

    The bounds are the paper's, 3e-4 and 4e-4: a mean of log-ratios is far nearer to 0 than a single one. They fit
    ratios to the policy just before the step, so `old_log_probs` is "recompute" by default.
    """
    return compose(
        settings,
        name="gspo",
        advantages=_normalized(settings),
        policy_loss=partial(sequence_ratio_loss, **ratio_bounds(settings, clip_low=3e-4, clip_high=4e-4)),
        aggregation="sequence-mean-token-mean",
    )


def cispo(settings: LearnerSettings) -> Algorithm:
    """CISPO: the clipped ratio is a weight without gradient, so that every token has a gradient (arXiv:2506.13585).

    Ratios are clipped to at most 1 + clip_high (5, as in TRL) and, if `clip_low` is set, at least 1 - clip_low (verl).
    """

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        clip_high = 4.0 if settings.clip_high is None else settings.clip_high
        return clipped_weight_loss(log_probs, old_log_probs, advantages, settings.clip_low, clip_high)

    return compose(
        settings,
        name="cispo",
        advantages=_normalized(settings),
        policy_loss=loss,
        aggregation="token-mean",
    )


def ppo(settings: LearnerSettings) -> Algorithm:
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022,
    arXiv:2203.02155).

    A token's reward is -kl_coefficient * KL; the completion's reward, clipped to +-5, is added at its last token.
    Advantages are GAE's, whitened; returns are advantages + values before whitening. If a batch's mean ratio is above
    20, the policy's optimizer step is skipped. The critic is in `quartet_trainer.learner.critic`.
    """

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


ALGORITHMS: dict[str, AlgorithmFactory] = {
    factory.__name__: factory
    for factory in (grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, cispo, ppo)
}
