"""The loss of supervised fine-tuning. No run can name it: its rows have no rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored

if TYPE_CHECKING:
    from torch import Tensor

    from quartet_trainer.algorithms.losses import TokenLosses


class Sft(Algorithm):
    """-log_prob of each token; with `aggregation` token-mean the mean over the batch's tokens in the loss."""

    compares_groups = False

    name: Literal["sft"] = "sft"

    def advantages(self, scored: Scored) -> Estimate:
        return Estimate(scored.mask.double())

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import TokenLosses

        ratio = log_probs.detach().new_ones(log_probs.shape)
        return TokenLosses(loss=-log_probs, ratio=ratio, clipped_low=ratio < 1, clipped_high=ratio > 1)
