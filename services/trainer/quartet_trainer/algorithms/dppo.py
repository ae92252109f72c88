"""DPPO: a trust region of divergences in place of the clipped ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from quartet_trainer.algorithms.base import GroupNormalized

if TYPE_CHECKING:
    from torch import Tensor

    from quartet_trainer.algorithms.losses import TokenLosses

BOUNDS = {"tv": 0.15, "kl": 0.05}
"""The bound of each divergence that the paper recommends."""
LEAST_OTHERS = 1e-8
"""Least probability of all other tokens in a logarithm."""


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, divergence: Literal["tv", "kl"]) -> Tensor:
    """The divergence of the current from the old policy [t], of the sampled token against all others together.

    With p the old and q the current probability of the token, tv: |q - p|; kl: p log(p / q) + (1 - p) log((1 - p) /
    (1 - q)).
    """
    if divergence == "tv":
        return (log_probs.exp() - old_log_probs.exp()).abs()
    others, old_others = -log_probs.expm1(), -old_log_probs.expm1()
    of_others = old_others.clamp(min=LEAST_OTHERS).log() - others.clamp(min=LEAST_OTHERS).log()
    return old_log_probs.exp() * (old_log_probs - log_probs) + old_others * of_others


class DPPO(GroupNormalized):
    """DPPO: the ratio is not clipped; a token has no loss where its divergence is above a bound and the update would
    raise it further (Qi et al. 2026, arXiv:2602.04879).

    The loss of a token is -mask * ratio * A; the mask is 0 where A > 0, ratio > 1 and the divergence is above
    clip_high, and where A < 0, ratio < 1 and it is above clip_low. The old policy should be the rollout's,
    the default of old_log_probs: the trust region is around the policy that generated the tokens.

    >>> advantages([1, 0], [1, 1])
    [0.71, -0.71, 0.0, 0.0]
    """

    name: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = Field(
        "tv", description="Of the sampled token against all others: total variation, or KL(old || current)."
    )
    clip_low: float | None = Field(
        None,
        ge=0,
        description="Bound of the divergence where a token becomes less likely. Unset: 0.15 for tv, 0.05 for kl.",
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        description="Bound of the divergence where a token becomes more likely. Unset: 0.15 for tv, 0.05 for kl.",
    )

    def policy_loss(self, log_probs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> TokenLosses:
        from quartet_trainer.algorithms.losses import TokenLosses, importance_ratio

        usual = BOUNDS[self.divergence]
        low, high = (usual if bound is None else bound for bound in (self.clip_low, self.clip_high))
        current, ratio = log_probs.detach(), importance_ratio(log_probs, old)
        moved = binary_divergence(current, old, self.divergence)
        masked_low = (advantages < 0) & (current < old) & (moved > low)
        masked_high = (advantages > 0) & (current > old) & (moved > high)
        loss = -(ratio * advantages).masked_fill(masked_low | masked_high, 0.0)
        return TokenLosses(loss=loss, ratio=ratio.detach(), clipped_low=masked_low, clipped_high=masked_high)
