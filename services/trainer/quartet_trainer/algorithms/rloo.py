"""RLOO, with the ratio of each token or, as TRL has it, of the completion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from quartet_trainer.algorithms.base import Aggregation, ClippedRatio, OldLogProbs

if TYPE_CHECKING:
    from torch import Tensor

    from quartet_trainer.algorithms.losses import TokenLosses


class _LeaveOneOut(ClippedRatio):
    aggregation: Aggregation = "sequence-mean-token-sum"

    def completion_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        from quartet_trainer.algorithms.advantages import leave_one_out

        return leave_one_out(rewards, groups)


class RLOO(_LeaveOneOut):
    """RLOO: A = r - mean of the group's other completions (Ahmadian et al. 2024, arXiv:2402.14740).

    The ratio is clipped per token; losses are summed over a completion, because the completion is the action.

    >>> advantages([1, 0], [1, 1])
    [1.0, -1.0, 0.0, 0.0]
    """

    name: Literal["rloo"] = "rloo"


class RLOOSequence(_LeaveOneOut):
    """RLOO whose ratio is the completion's, the product of its tokens' ratios, as in TRL.

    The completion is the action: its loss is -min(ratio * A, clip(ratio) * A), and each of its tokens has an equal part
    of it. The product grows with the length: an engine's arithmetic alone moves it out of the bounds, hence the ratio
    is to the policy just before the step.

    >>> advantages([1, 0], [1, 1])
    [1.0, -1.0, 0.0, 0.0]
    """

    name: Literal["rloo_sequence"] = "rloo_sequence"
    old_log_probs: OldLogProbs = "recompute"

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import sequence_counts, sequence_ratio_loss

        bounds = self.clip_low, self.clip_high, self.dual_clip
        tokens = sequence_ratio_loss(log_probs, old, advantages, sequences, *bounds, product=True)
        # Each token has the completion's ratio, and the gradient of its own log-prob: the gradients add up to the
        # completion's, the values to as many times its loss as it has tokens.
        value = tokens.loss.detach()
        return replace(tokens, loss=tokens.loss - value + value / sequence_counts(value, sequences))
