"""From a global batch to what each rank computes: mask, rewards of tokens, advantages, mini-batches, weights, shares.

What the estimator needs of the whole batch beforehand, values or log-probs, is computed without gradient by all ranks,
each its share, and put together: so every rank makes the same advantages, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.algorithms import Algorithm, Scored
from quartet_trainer.algorithms.losses import KL_ESTIMATORS, token_weights
from quartet_trainer.batch import ExperienceBatch, MicroBatch, StepPlan, collate, plan_step
from quartet_trainer.learner import distributed
from quartet_trainer.learner.critic import Critic, CriticTargets, HeadCritic
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner_settings import LearnerSettings

Forward = Callable[[MicroBatch], Tensor]
"""Without gradient, from a micro-batch to one number, or some, for each of its t tokens: [t], or [numbers, t]."""


@dataclass(frozen=True)
class Update:
    """One optimizer step: on a whole batch, or on a mini-batch of it."""

    plan: StepPlan
    targets: CriticTargets | None
    """None without a critic."""


@dataclass(frozen=True)
class _Estimated:
    """What all updates of a batch have in common, made with the weights before the first."""

    mask: Tensor
    """bool [T]: the trained tokens."""
    advantages: Tensor
    """float64 [T]."""
    values: Tensor | None = None
    """float64 [T], the critic's."""
    returns: Tensor | None = None
    """float64 [T]."""
    old_log_probs: Tensor | None = None
    """float64 [T]; None where there is one update, or the ratio is taken to the rollout's."""
    metrics: dict[str, float] = field(default_factory=dict)


class Planner:
    """Plans the steps of one learner."""

    def __init__(
        self,
        settings: LearnerSettings,
        algorithm: Algorithm,
        plugin: Plugin,
        max_new_tokens: int,
        critic: Critic | HeadCritic | None = None,
    ) -> None:
        """Take the parts; `max_new_tokens` is the "constant" aggregation's length."""
        self._settings = settings
        self._algorithm = algorithm
        self._plugin = plugin
        self._max_new_tokens = max_new_tokens
        self._critic = critic
        self._joint = isinstance(critic, HeadCritic)
        """Whether it learns from the policy's own passes."""
        # Where every token has a loss of its own, no completion can be spared.
        kl_in_loss = settings.kl_coefficient > 0 and algorithm.kl_in == "loss"
        self._kl_in_reward = settings.kl_coefficient > 0 and algorithm.kl_in == "reward"
        self._several = settings.epochs * settings.mini_batches > 1
        each_counts = kl_in_loss or self._joint or settings.entropy_coefficient > 0
        self._skip = settings.skip_zero_advantage and not each_counts

    def updates(self, batch: ExperienceBatch, step: int) -> tuple[StepPlan, list[Update], dict[str, float]]:
        """The optimizer steps of a batch: `epochs` times `mini_batches`, or fewer where it has fewer groups than those.

        Advantages, returns, values and old log-probs are those before the first of them. Every mini-batch has weights
        of its own, as if it were the batch.

        Returns:
            The plan of the whole batch, the updates in order, and metrics that are known by now.
        """
        estimated = self._estimate(batch)
        whole = self._update(batch, estimated)
        if not self._several:
            return whole.plan, [whole], estimated.metrics
        chosen = self._mini_batches(int(batch.groups.max()) + 1, step)
        return whole.plan, [self._update(batch, estimated, groups) for groups in chosen], estimated.metrics

    def _mini_batches(self, groups: int, step: int) -> Iterator[Tensor]:
        """Numbers of groups, int64: shuffled anew for each pass, by the seed, the step and the pass alone."""
        for epoch in range(self._settings.epochs):
            order = np.random.default_rng([self._settings.seed, step, epoch]).permutation(groups)
            for part in np.array_split(order, min(self._settings.mini_batches, groups)):
                yield torch.from_numpy(part)

    def _estimate(self, batch: ExperienceBatch) -> _Estimated:
        algorithm = self._algorithm
        mask = batch.loss_mask
        if algorithm.mask_truncated:
            mask = mask & ~batch.per_token(batch.truncated)
        ones = torch.ones(mask.shape, dtype=torch.float64)
        everything = self._cut(batch, mask, ones, ones, skip=False)
        old = values = None
        wants_old = self._settings.ratio_to == "recompute" and (self._several or self._kl_in_reward)
        if wants_old and self._joint:
            old, values = self._of_all(batch, everything, self._plugin.log_probs_and_values, numbers=2)
        elif wants_old:
            old = self._of_all(batch, everything, self._plugin.log_probs)
        kl = self._kl_to_reference(batch, everything, old)
        if self._joint and values is None:
            values = self._of_all(batch, everything, self._plugin.values)
        elif isinstance(self._critic, Critic):
            everyone = self._cut(batch, mask, ones, ones, skip=False, all_ranks=True)
            values = self._of_all(batch, everyone, self._critic.values, by_policy=False)

        rewards = batch.rewards.double()
        if algorithm.reward_clip:
            rewards = rewards.clamp(-algorithm.reward_clip, algorithm.reward_clip)
        kl_penalty = torch.zeros_like(ones) if kl is None else self._settings.kl_coefficient * kl
        estimate = algorithm.advantages(Scored(rewards, batch.groups, batch.rows, mask, kl_penalty, values))
        return _Estimated(
            mask=mask,
            advantages=estimate.advantages,
            values=values,
            returns=estimate.returns,
            old_log_probs=old if self._several else None,
            metrics={} if kl is None else {"kl": (kl.sum() / mask.sum().clamp(min=1)).item()},
        )

    def _update(self, batch: ExperienceBatch, estimated: _Estimated, groups: Tensor | None = None) -> Update:
        """The optimizer step on these groups, int64; None: on all."""
        mask, completions = estimated.mask, batch.completions
        if groups is not None:
            chosen = torch.isin(batch.groups, groups)
            mask, completions = mask & batch.per_token(chosen), int(chosen.sum())
        weights = token_weights(
            self._algorithm.aggregation, mask, batch.rows, completions=completions, length=self._max_new_tokens
        )
        plan = self._cut(batch, mask, weights, estimated.advantages, skip=self._skip)
        targets = None
        if estimated.values is not None and estimated.returns is not None:
            everyone = plan
            if not self._joint:
                ones = torch.ones_like(weights)
                everyone = self._cut(batch, mask, weights, ones, skip=False, all_ranks=True)
            targets = CriticTargets(everyone, estimated.values, estimated.returns)
        return Update(replace(plan, old_log_probs=estimated.old_log_probs), targets)

    def _cut(
        self,
        batch: ExperienceBatch,
        mask: Tensor,
        weights: Tensor,
        advantages: Tensor,
        *,
        skip: bool,
        all_ranks: bool = False,
    ) -> StepPlan:
        """This rank's share among those of the policy's plugin that see different data, or among all (the critic's)."""
        plugin = self._plugin
        critic_shares = isinstance(self._critic, Critic) and self._critic.shares_prompts
        return plan_step(
            batch,
            mask=mask,
            weights=weights,
            advantages=advantages,
            skip_zero_advantage=skip,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            max_padding=self._settings.max_padding,
            rank=plugin.ranks.rank if all_ranks else plugin.data_rank,
            world_size=plugin.ranks.world_size if all_ranks else plugin.data_size,
            share_prompts=critic_shares if all_ranks else plugin.shares_prompts,
        )

    def _kl_to_reference(self, batch: ExperienceBatch, plan: StepPlan, old: Tensor | None) -> Tensor | None:
        """float64 [T], of the old policy, 0 outside the mask; None where no KL is taken from the reward."""
        if not self._kl_in_reward:
            return None
        old = batch.rollout_log_probs.double() if old is None else old
        reference = self._of_all(batch, plan, self._plugin.reference_log_probs)
        return torch.where(plan.mask, KL_ESTIMATORS[self._algorithm.kl_estimator](old, reference), 0.0)

    def _of_all(
        self, batch: ExperienceBatch, plan: StepPlan, forward: Forward, *, by_policy: bool = True, numbers: int = 1
    ) -> Tensor:
        """`forward` of every trained token of the global batch, float64 [T] on the CPU; 0 elsewhere.

        `numbers`: of each token; more than one: [numbers, T].

        `by_policy`: whether it is a forward of the plugin's. Then, of ranks that have the same tokens, one's are added
        to it; and where each pass takes all ranks, a rank without a micro-batch goes through its last once more.
        """
        device, count = self._plugin.ranks.device, len(plan.micro_batches)
        counts = self._plugin.counts or not by_policy
        found = torch.zeros(numbers, batch.rows.numel(), dtype=torch.float64, device=device)
        for index in range(self._plugin.passes(count) if by_policy else count):
            micro_batch = collate(batch, plan, plan.micro_batches[min(index, count - 1)]).to(device, self._plugin.dtype)
            with torch.no_grad():
                values = forward(micro_batch)
            if not plan.idle and counts:
                found[:, micro_batch.tokens] = values.double()
        found = distributed.sum_over_ranks(found).cpu()
        return found if numbers > 1 else found[0]
