"""The built-in algorithms: each class has its own keys, defaults, advantages and loss; an example is its test.

DPPO, MaxRL and RLOO are in files of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from quartet_trainer.algorithms.base import (
    Aggregation,
    Algorithm,
    ClipHigh,
    ClipLow,
    ClippedRatio,
    CriticSection,
    Estimate,
    GroupNormalized,
    KlEstimator,
    KlIn,
    MaskTruncated,
    MaxMeanRatio,
    OldLogProbs,
    RewardClip,
    Scored,
)
from quartet_trainer.algorithms.dppo import DPPO
from quartet_trainer.algorithms.max_rl import MaxRL
from quartet_trainer.algorithms.rloo import RLOO, RLOOSequence

if TYPE_CHECKING:
    from torch import Tensor

    from quartet_trainer.algorithms.losses import TokenLosses

Gamma = Annotated[float, Field(ge=0, le=1, description="Discount of later rewards, per token.")]


class GRPO(GroupNormalized, ClippedRatio):
    """GRPO: A = (r - mean) / (std + std_epsilon) of the group, clipped ratio (Shao et al. 2024, arXiv:2402.03300).

    The default aggregation is "token-mean", as in TRL and verl; the paper's is "sequence-mean-token-mean".

    >>> advantages([1, 0], [1, 1])
    [0.71, -0.71, 0.0, 0.0]
    """

    name: Literal["grpo"] = "grpo"


class DrGRPO(ClippedRatio):
    """Dr. GRPO: GRPO without its two biases, the division by the std and that by the length (arXiv:2503.20783).

    A = r - mean of the group. The sum of losses is divided by completions * max_new_tokens, a constant.

    >>> advantages([1, 0], [1, 1])
    [0.5, -0.5, 0.0, 0.0]
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "constant"

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        from quartet_trainer.algorithms.advantages import group_centered

        return group_centered(rewards, groups)


class DAPO(GroupNormalized, ClippedRatio):
    """DAPO: GRPO with clip-higher, token-mean, truncated completions masked (Yu et al. 2025, arXiv:2503.14476).

    Its dynamic sampling is on by default: groups of zero variance are replaced before they get here; those that remain
    count in the denominator. Its soft length penalty is part of the reward: the verifier `length`.

    >>> advantages([1, 0], [1, 1])
    [0.71, -0.71, 0.0, 0.0]
    """

    samples_dynamically: ClassVar[bool] = True

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    mask_truncated: MaskTruncated = True


class ReinforcePP(ClippedRatio):
    """REINFORCE++: no groups and no critic; token returns, whitened over the batch (Hu 2025, arXiv:2501.03262).

    The k1 KL is taken from each token's reward; the completion's reward is added at its last token.

    >>> advantages([1, 0], [1, 1])
    [0.5, -1.5, 0.5, 0.5]
    """

    compares_groups: ClassVar[bool] = False

    name: Literal["reinforce_pp"] = "reinforce_pp"
    kl_estimator: KlEstimator = "k1"
    kl_in: KlIn = "reward"
    gamma: Gamma = 1.0

    def advantages(self, scored: Scored) -> Estimate:
        from quartet_trainer.algorithms.advantages import returns_to_go, token_rewards, whitened

        rewards = token_rewards(scored.rewards, scored.kl_penalty, scored.mask, scored.rows)
        return Estimate(whitened(returns_to_go(rewards, scored.mask, scored.rows, self.gamma), scored.mask))


class ReinforcePPBaseline(ClippedRatio):
    """REINFORCE++-baseline: A = r - mean of the group, whitened over the batch's tokens (Hu 2025, arXiv:2501.03262).

    The k2 KL is in the loss by default. ColossalChat calls it REINFORCE_PPB and takes the KL from each token's
    advantage before whitening: `kl_in = "reward"` does that. (It then multiplies by the standard deviation where
    whitening divides by it.)

    >>> advantages([1, 0], [1, 1])
    [1.22, -1.22, 0.0, 0.0]
    """

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_estimator: KlEstimator = "k2"

    def advantages(self, scored: Scored) -> Estimate:
        from quartet_trainer.algorithms.advantages import group_centered, whitened

        centered = group_centered(scored.rewards, scored.groups)[scored.rows]
        return Estimate(whitened(centered - scored.kl_penalty, scored.mask))


class GSPO(GroupNormalized, ClippedRatio):
    """GSPO: GRPO with one ratio per completion, its tokens' geometric mean (Zheng et al. 2025, arXiv:2507.18071).

    It is computed as GSPO-token, sg(ratio) * pi / sg(pi), which also takes a different advantage for each turn.

    The bounds are the paper's: a mean of log-ratios is far nearer to 0 than a single one. An engine's arithmetic, or
    one step of staleness, changes it by more than that: hence the ratio is to the policy just before the step.

    >>> advantages([1, 0], [1, 1])
    [0.71, -0.71, 0.0, 0.0]
    """

    name: Literal["gspo"] = "gspo"
    aggregation: Aggregation = "sequence-mean-token-mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    old_log_probs: OldLogProbs = "recompute"

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import sequence_ratio_loss

        bounds = self.clip_low, self.clip_high, self.dual_clip
        return sequence_ratio_loss(log_probs, old, advantages, sequences, *bounds)


class CISPO(GroupNormalized):
    """CISPO: GRPO whose clipped ratio is a weight without gradient: every token has a gradient (arXiv:2506.13585).

    The loss of a token is -sg(clip(ratio)) * A * log_prob. Ratios are at most 5, as in TRL.

    >>> advantages([1, 0], [1, 1])
    [0.71, -0.71, 0.0, 0.0]
    """

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Ratio is clipped below 1 - this, as in verl. Unset: not below."
    )
    clip_high: ClipHigh = 4.0

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import clipped_weight_loss

        return clipped_weight_loss(log_probs, old, advantages, self.clip_low, self.clip_high)


class PPO(ClippedRatio):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022,
    arXiv:2203.02155).

    A token's reward is -kl_coefficient * KL; the completion's reward, clipped, is added at its last token. Advantages
    are GAE's, whitened; returns are advantages + values before whitening.

    >>> advantages([1, 0], [1, 1])
    [0.5, -1.5, 0.5, 0.5]
    """

    compares_groups: ClassVar[bool] = False

    name: Literal["ppo"] = "ppo"
    kl_estimator: KlEstimator = "k1"
    kl_in: KlIn = "reward"
    reward_clip: RewardClip = 5.0
    max_mean_ratio: MaxMeanRatio = 20.0
    gamma: Gamma = 1.0
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of generalized advantage estimation.")
    critic: CriticSection = Field(CriticSection(), description="The value model.")

    def value_model(self) -> CriticSection:
        return self.critic

    def advantages(self, scored: Scored) -> Estimate:
        from quartet_trainer.algorithms.advantages import generalized_advantages, token_rewards, whitened

        assert scored.values is not None, "it has a critic"
        rewards = token_rewards(scored.rewards, scored.kl_penalty, scored.mask, scored.rows)
        estimated = generalized_advantages(
            rewards, scored.values, scored.mask, scored.rows, self.gamma, self.gae_lambda
        )
        return Estimate(whitened(estimated, scored.mask), returns=estimated + scored.values)


ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.model_fields["name"].default: kind
    for kind in (
        *(GRPO, DrGRPO, DAPO, RLOO, RLOOSequence, ReinforcePP, ReinforcePPBaseline),
        *(GSPO, CISPO, DPPO, MaxRL, PPO),
    )
}
