"""From a global batch to what each rank computes: mask, rewards of tokens, advantages, weights, shares.

What the estimator needs of the whole batch beforehand, values or log-probs, is computed without gradient by all ranks,
each its share, and put together: so every rank makes the same advantages, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet_trainer.algorithms import Algorithm, Scored
from quartet_trainer.batches import ExperienceBatch, MicroBatch, StepPlan, collate, plan_step
from quartet_trainer.learner import distributed
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.aggregation import token_weights
from quartet_trainer.losses.kl import KL_ESTIMATORS

Forward = Callable[[MicroBatch], Tensor]
"""Without gradient, from a micro-batch to one number for each of its t tokens."""


@dataclass(frozen=True)
class CriticTargets:
    """What the critic learns from a batch."""

    plan: StepPlan
    """Its micro-batches: all completions with a trained token."""
    old_values: Tensor
    """float64 [T]."""
    returns: Tensor
    """float64 [T]."""


class Planner:
    """Plans the steps of one learner."""

    def __init__(
        self,
        settings: LearnerSettings,
        algorithm: Algorithm,
        plugin: Plugin,
        max_new_tokens: int,
        values: Forward | None = None,
    ) -> None:
        """Take the parts; `max_new_tokens` is the "constant" aggregation's length, `values` the critic's forward."""
        self._settings = settings
        self._algorithm = algorithm
        self._plugin = plugin
        self._max_new_tokens = max_new_tokens
        self._values = values
        self._dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        # Where every token has a loss of its own, no completion can be spared.
        kl_in_loss = settings.kl_coefficient > 0 and algorithm.kl_in == "loss"
        self._skip = settings.skip_zero_advantage and not kl_in_loss and not settings.entropy_coefficient

    def plan(self, batch: ExperienceBatch) -> tuple[StepPlan, CriticTargets | None, dict[str, float]]:
        """This rank's part of the step, the critic's where there is one, and metrics that are known by now."""
        algorithm = self._algorithm
        mask = batch.loss_mask
        if algorithm.mask_truncated:
            mask = mask & ~batch.per_token(batch.truncated)
        weights = token_weights(
            algorithm.aggregation, mask, batch.rows, completions=batch.completions, length=self._max_new_tokens
        )
        everything = self._cut(batch, mask, weights, torch.ones_like(weights), skip=False)
        kl = self._kl_to_reference(batch, everything)
        values = None if self._values is None else self._of_all(batch, everything, self._values)

        rewards = batch.rewards.double()
        if algorithm.reward_clip:
            rewards = rewards.clamp(-algorithm.reward_clip, algorithm.reward_clip)
        kl_penalty = torch.zeros_like(weights) if kl is None else self._settings.kl_coefficient * kl
        estimate = algorithm.advantages(Scored(rewards, batch.groups, batch.rows, mask, kl_penalty, values))

        targets = None
        if values is not None and estimate.returns is not None:
            targets = CriticTargets(everything, values, estimate.returns)
        known = {} if kl is None else {"kl": (kl.sum() / mask.sum().clamp(min=1)).item()}
        return self._cut(batch, mask, weights, estimate.advantages, skip=self._skip), targets, known

    def _cut(
        self, batch: ExperienceBatch, mask: Tensor, weights: Tensor, advantages: Tensor, *, skip: bool
    ) -> StepPlan:
        return plan_step(
            batch,
            mask=mask,
            weights=weights,
            advantages=advantages,
            skip_zero_advantage=skip,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            max_padding=self._settings.max_padding,
            rank=self._plugin.data_rank,
            world_size=self._plugin.data_size,
        )

    def _kl_to_reference(self, batch: ExperienceBatch, plan: StepPlan) -> Tensor | None:
        """float64 [T], of the old policy, 0 outside the mask; None where no KL is taken from the reward."""
        if self._settings.kl_coefficient == 0 or self._algorithm.kl_in == "loss":
            return None
        old = batch.rollout_log_probs.double()
        if self._settings.old_log_probs == "recompute":
            old = self._of_all(batch, plan, self._plugin.log_probs)
        reference = self._of_all(batch, plan, self._plugin.reference_log_probs)
        return torch.where(plan.mask, KL_ESTIMATORS[self._algorithm.kl_estimator](old, reference), 0.0)

    def _of_all(self, batch: ExperienceBatch, plan: StepPlan, forward: Forward) -> Tensor:
        """`forward` of every trained token of the global batch, float64 [T] on the CPU; 0 elsewhere."""
        device = self._plugin.ranks.device
        found = torch.zeros(batch.rows.numel(), dtype=torch.float64, device=device)
        for completions in plan.micro_batches:
            micro_batch = collate(batch, plan, completions).to(device, self._dtype)
            with torch.no_grad():
                values = forward(micro_batch)
            if not plan.idle and self._plugin.counts:
                found[micro_batch.tokens] = values.double()
        return distributed.sum_over_ranks(found).cpu()
