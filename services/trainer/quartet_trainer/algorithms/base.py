"""The interface of an algorithm. Its class is its table of the run file, `[trainer.algorithm]`, and how it computes.

Imports torch only where it computes, so that a run file can be checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from quartet_common.sections import Section

if TYPE_CHECKING:
    from torch import Tensor

    from quartet_trainer.algorithms.losses import TokenLosses
    from quartet_trainer.algorithms.turns import Turns

# Types with a description: a class that has another default repeats the type alone.
Aggregation = Annotated[
    Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"],
    Field(description="How token losses are aggregated."),
]
KlEstimator = Annotated[Literal["k1", "k2", "k3"], Field(description="Estimator of the KL to the initial weights.")]
KlIn = Annotated[Literal["loss", "reward"], Field(description="Added to the loss, or subtracted from the reward.")]
Credit = Annotated[
    Literal["episode", "turn", "gigpo"],
    Field(
        description="What an advantage compares: episode: completions by their rewards; turn: turns of one position by "
        "the rewards from there on; gigpo: completions, plus turns that began with the same tokens."
    ),
]
MaskTruncated = Annotated[bool, Field(description="Leave truncated completions out of the loss.")]
RewardClip = Annotated[float, Field(ge=0, description="Rewards are clipped to +- this; 0: no clipping.")]
MaxMeanRatio = Annotated[float, Field(ge=0, description="Mean ratio above which a batch is skipped; 0: no limit.")]
OldLogProbs = Annotated[
    Literal["rollout", "recompute"],
    Field(description="Denominator of the ratio: the rollout's log-probs, or the trainer's own before the step."),
]
ClipLow = Annotated[float, Field(ge=0, le=1, description="Ratio is clipped below 1 - this.")]
ClipHigh = Annotated[float, Field(ge=0, description="Ratio is clipped above 1 + this.")]


@dataclass(frozen=True)
class Scored:
    """The input of an advantage estimator: a global batch of N completions and T completion tokens."""

    rewards: Tensor
    """float64 [N], clipped if the algorithm clips them."""
    groups: Tensor
    """int64 [N]: the group of each completion; of agents in several seats, the group's part of one seat."""
    rows: Tensor
    """int64 [T]: the completion of each token, not decreasing."""
    mask: Tensor
    """bool [T]: the trained tokens."""
    kl_penalty: Tensor
    """float64 [T]: kl_coefficient * KL if the KL is taken from the reward, otherwise 0; 0 outside the mask."""
    values: Tensor | None = None
    """float64 [T]: the critic's value of the state in which the token was chosen; None without a critic."""
    turns: Turns | None = None
    """The turns of the completions, for credit by turn."""

    def net_rewards(self) -> Tensor:
        """Rewards minus the sum of their completion's KL penalties, float64 [N]."""
        nothing = self.rewards.new_zeros(self.rewards.shape)
        return self.rewards - nothing.index_add_(0, self.rows, self.kl_penalty)


@dataclass(frozen=True)
class Estimate:
    """The output of an advantage estimator."""

    advantages: Tensor
    """float64 [T]; values outside the mask are ignored."""
    returns: Tensor | None = None
    """float64 [T]: the critic's targets."""


class CriticSection(Section):
    """The value model of an algorithm that has one."""

    form: Literal["separate", "head"] = Field(
        default="separate",
        description="separate: its own model; head: a value head on the policy's trunk, one forward pass and one loss.",
    )
    model: Path | None = Field(
        default=None,
        description="Hugging Face folder for a separate one. Unset: the policy's model. Its value head starts at 0.",
    )
    learning_rate: float | None = Field(
        default=None,
        ge=0,
        description="Peak learning rate of its AdamW; with form head, that of the head. Unset: trainer.learning_rate.",
    )
    value_coefficient: float = Field(
        default=0.1, gt=0, description="Weight of its loss relative to the policy's; form head only."
    )
    value_clip: float = Field(
        default=0.2, ge=0, description="Clip range of the value loss: how far a value may move in a step; 0: none."
    )

    @model_validator(mode="after")
    def _head_has_no_model(self) -> Self:
        if self.form == "head" and self.model is not None:
            raise ValueError('model: a head has no model but the policy; leave it out, or set form = "separate"')
        return self


class Algorithm(Section):
    """A policy-gradient algorithm: its keys, its advantages and its loss, which the learner combines.

    loss = sum over tokens of weight * (correction * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy).
    The aggregation determines the weight. With `kl_in` "reward", the KL is taken from the reward instead.
    """

    compares_groups: ClassVar[bool] = True
    """Whether an advantage is relative to the other completions of its prompt."""
    samples_dynamically: ClassVar[bool] = False
    """Whether groups without variance are replaced, unless `trainer.dynamic_sampling.enabled` says otherwise."""

    name: str
    aggregation: Aggregation = "token-mean"
    kl_estimator: KlEstimator = "k3"
    kl_in: KlIn = "loss"
    credit: Credit = "episode"
    turn_discount: float = Field(
        1.0, ge=0, le=1, description="Discount of later rewards, per turn (credit turn, gigpo)."
    )
    state_weight: float = Field(1.0, ge=0, description="Weight of the advantage within equal states (credit gigpo).")
    mask_truncated: MaskTruncated = False
    reward_clip: RewardClip = 0.0
    max_mean_ratio: MaxMeanRatio = 0.0
    old_log_probs: OldLogProbs = "rollout"
    correction: Literal["none", "tis", "icepop", "sequence-mask"] = Field(
        "tis",
        description="Weighting of tokens by recomputed over rollout probabilities; none with old_log_probs rollout.",
    )
    tis_cap: float = Field(
        2.0, ge=0, description="Cap of the truncated importance weight (correction tis); 0: no such weight."
    )
    icepop_range: tuple[float, float] = Field(
        (0.5, 5.0), description="Weights outside drop their token (correction icepop)."
    )
    sequence_mask_cap: float = Field(
        3.0, gt=0, description="Weight above which a completion is dropped (correction sequence-mask)."
    )
    sequence_mask_mean: Literal["product", "geometric"] = Field(
        "product", description="A completion's weight: its tokens' product, or their geometric mean."
    )

    @field_validator("icepop_range")
    @classmethod
    def _icepop_range_holds_one(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= bounds[0] <= 1 <= bounds[1]:
            raise ValueError(f"must hold 1, from a number in [0, 1] to one >= 1; got {list(bounds)}")
        return bounds

    @model_validator(mode="after")
    def _correction_has_both_log_probs(self) -> Self:
        if self.correction in ("icepop", "sequence-mask") and self.old_log_probs == "rollout":
            raise ValueError(
                f"correction: {self.correction!r} compares the trainer's log-probs with the rollout's; "
                'it needs old_log_probs = "recompute"'
            )
        return self

    @model_validator(mode="after")
    def _credit_is_of_completions(self) -> Self:
        if self.credit == "episode":
            return self
        if type(self).advantages is not Algorithm.advantages:
            raise ValueError(f"credit: {self.name} has an advantage of its own for each token; allowed: episode")
        if self.kl_in == "reward" or self.reward_clip:
            what = "kl_in = 'reward'" if self.kl_in == "reward" else "reward_clip"
            raise ValueError(f"credit: {what} changes the reward of whole completions; leave it out, or set episode")
        return self

    def value_model(self) -> CriticSection | None:
        """The settings of the critic, for an algorithm that needs values and estimates returns; None: no critic."""
        return None

    def advantages(self, scored: Scored) -> Estimate:
        """Estimate the advantage of each token; here its completion's, or by `credit` its turn's.

        The advantage of a turn is `completion_advantages` of the rewards from it on, the last turn's including the
        completion's other rewards, over the group's turns of the same position; or over those that began with the same
        tokens, added to the completion's (GiGPO, Feng et al. 2025, arXiv:2505.10978).
        """
        from quartet_trainer.algorithms.advantages import same_position

        turns = scored.turns
        if self.credit == "turn" and turns is not None:
            places = same_position(scored.groups[turns.completions], turns.indices)
            return Estimate(self.completion_advantages(turns.returns(self.turn_discount), places)[turns.of_token])
        advantages = self.completion_advantages(scored.net_rewards(), scored.groups)[scored.rows]
        if self.credit == "gigpo" and turns is not None:
            within = self.completion_advantages(turns.returns(self.turn_discount), turns.states)[turns.of_token]
            advantages = advantages + self.state_weight * within
        return Estimate(advantages)

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """The advantage of each completion, [N], from rewards, float64 [N], and groups, int64 [N]."""
        raise NotImplementedError

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        """The losses of a micro-batch's t tokens.

        Args:
            log_probs: float [t], with gradient.
            old: float [t], log-probs of the ratio's denominator.
            advantages: float [t].
            sequences: int64 [t], the completion of each token.
        """
        raise NotImplementedError

    def correction_factors(self, old: Tensor, rollout: Tensor, sequences: Tensor) -> Tensor:
        """The factors [t] of token losses, from log-probs of the old policy and the rollout's; arguments as above."""
        from quartet_trainer.algorithms import losses

        if self.old_log_probs == "recompute":
            if self.correction == "sequence-mask":
                geometric = self.sequence_mask_mean == "geometric"
                return losses.masked_sequence_weight(old, rollout, sequences, self.sequence_mask_cap, geometric)
            if self.correction == "icepop":
                return losses.masked_importance_weight(old, rollout, *self.icepop_range)
            if self.correction == "tis" and self.tis_cap:
                return losses.truncated_importance_weight(old, rollout, self.tis_cap)
        return old.new_ones(old.shape)


class ClippedRatio(Algorithm):
    """PPO's clipped ratio as policy loss."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float = Field(
        0.0,
        ge=0,
        description="Where the advantage A < 0, the loss is at most -this * A; above 1 (3 is usual); 0: no bound.",
    )

    @field_validator("dual_clip")
    @classmethod
    def _dual_clip_above_one(cls, dual_clip: float) -> float:
        if 0 < dual_clip <= 1:
            raise ValueError(f"must be above 1, or 0 for none; got {dual_clip:g}")
        return dual_clip

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import clipped_ratio_loss

        return clipped_ratio_loss(log_probs, old, advantages, self.clip_low, self.clip_high, self.dual_clip)


class GroupNormalized(Algorithm):
    """GRPO's advantage of a completion."""

    std_epsilon: float = Field(1e-4, gt=0, description="Added to the group's standard deviation.")

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        from quartet_trainer.algorithms.advantages import group_normalized

        return group_normalized(rewards, groups, self.std_epsilon)
