"""Plans what each rank computes of a global batch: mask, advantages, mini-batches, token weights, shares.

Values and log-probs that the advantages need are computed first, without gradient: each rank computes its share, and
the shares are summed. So advantages are the same on every rank, however the batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quartet_trainer.algorithms import Scored
from quartet_trainer.algorithms.losses import KL_ESTIMATORS, token_weights
from quartet_trainer.batch import ExperienceBatch, MicroBatch, StepPlan, collate, plan_step
from quartet_trainer.learner import distributed
from quartet_trainer.learner.coefficients import Coefficients
from quartet_trainer.learner.critic import Critic, CriticTargets, HeadCritic
from quartet_trainer.learner.metrics import target_metrics
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.progress import PROGRESS

Forward = Callable[[MicroBatch], Tensor]
"""A forward pass without gradient, from a micro-batch of t tokens to one number per token, [t], or [numbers, t]."""


@dataclass(frozen=True)
class Update:
    """One optimizer step: on a whole batch, or on a mini-batch of it."""

    plan: StepPlan
    targets: CriticTargets | None
    """None without a critic."""


@dataclass(frozen=True)
class _Estimated:
    """What all updates of a batch share, computed with the weights before the first one."""

    mask: Tensor
    """bool [T]: the trained tokens."""
    advantages: Tensor
    """float64 [T]."""
    values: Tensor | None = None
    """float64 [T], the critic's."""
    returns: Tensor | None = None
    """float64 [T]."""
    old_log_probs: Tensor | None = None
    """float64 [T]; None with a single update, or if the ratio is to the rollout's."""
    metrics: dict[str, float] = field(default_factory=dict)


class Planner:
    """Plans the steps of one learner."""

    def __init__(
        self,
        settings: LearnerSettings,
        plugin: Plugin,
        coefficients: Coefficients,
        max_new_tokens: int,
        critic: Critic | HeadCritic | None,
    ) -> None:
        """`max_new_tokens` is the length by which the "constant" aggregation divides."""
        self._settings = settings
        self._algorithm = algorithm = settings.algorithm
        self._plugin = plugin
        self._coefficients = coefficients
        self._max_new_tokens = max_new_tokens
        self._critic = critic
        self._joint = isinstance(critic, HeadCritic)
        """Whether the critic is a value head, trained in the policy's own passes."""
        kl_in_loss = settings.kl_coefficient > 0 and algorithm.kl_in == "loss"
        self._kl_in_reward = settings.kl_coefficient > 0 and algorithm.kl_in == "reward"
        self._several = settings.epochs * settings.mini_batches > 1
        # With any of these losses, tokens of advantage 0 have a gradient too.
        all_needed = kl_in_loss or self._joint or settings.entropy_bonus
        self._skip = settings.skip_zero_advantage and not all_needed

    def updates(self, batch: ExperienceBatch, step: int) -> tuple[StepPlan, list[Update], dict[str, float]]:
        """Plan a batch's optimizer steps: `epochs` times `mini_batches`, or times its groups if they are fewer.

        Advantages, returns, values and old log-probs are computed once, before the first step. Token weights are
        normalized over each mini-batch.

        Returns:
            The plan of the whole batch, the updates in order, and the metrics known so far.
        """
        estimated = self._estimate(batch)
        whole = self._update(batch, estimated)
        if not self._several:
            return whole.plan, [whole], estimated.metrics
        chosen = self._mini_batches(int(batch.groups.max()) + 1, step)
        return whole.plan, [self._update(batch, estimated, groups) for groups in chosen], estimated.metrics

    def log_probs(self, batch: ExperienceBatch) -> Tensor:
        """The policy's log-probs of the tokens in the loss, float64 [tokens]."""
        ones = torch.ones(batch.loss_mask.shape, dtype=torch.float64)
        plan = self._plan(batch, batch.loss_mask, ones, ones, skip=False)
        return self._for_all_tokens(batch, plan, self._plugin.log_probs)[batch.loss_mask]

    def _mini_batches(self, groups: int, step: int) -> Iterator[Tensor]:
        """Group indices of each mini-batch, int64. Each pass is shuffled by the seed, the step and its own number."""
        for epoch in range(self._settings.epochs):
            order = np.random.default_rng([self._settings.seed, step, epoch]).permutation(groups)
            for part in np.array_split(order, min(self._settings.mini_batches, groups)):
                yield torch.from_numpy(part)

    def _estimate(self, batch: ExperienceBatch) -> _Estimated:
        algorithm = self._algorithm
        mask = batch.loss_mask
        if algorithm.mask_truncated:
            mask = mask & ~batch.truncated[batch.rows]
        ones = torch.ones(mask.shape, dtype=torch.float64)
        policy_plan = self._plan(batch, mask, ones, ones, skip=False)
        old = values = None
        distillation = self._settings.distillation
        needs_old = self._several or self._kl_in_reward or distillation.coefficient
        wants_old = algorithm.old_log_probs == "recompute" and needs_old
        if wants_old and self._joint:
            old, values = self._for_all_tokens(batch, policy_plan, self._plugin.log_probs_and_values, numbers=2)
        elif wants_old:
            old = self._for_all_tokens(batch, policy_plan, self._plugin.log_probs)
        kl = self._kl_to_reference(batch, policy_plan, old)
        if self._joint and values is None:
            values = self._for_all_tokens(batch, policy_plan, self._plugin.values)
        elif isinstance(self._critic, Critic):
            critic_plan = self._plan(batch, mask, ones, ones, skip=False, all_ranks=True)
            values = self._for_all_tokens(batch, critic_plan, self._critic.values, by_policy=False)

        rewards = batch.rewards.double()
        if algorithm.reward_clip:
            rewards = rewards.clamp(-algorithm.reward_clip, algorithm.reward_clip)
        kl_penalty = torch.zeros_like(ones) if kl is None else self._coefficients.kl * kl
        scored = Scored(
            rewards, batch.compared, batch.completion_of_token, mask, kl_penalty, values=values, turns=batch.turns
        )
        estimate = algorithm.advantages(scored)
        metrics = {} if kl is None else {"kl": (kl.sum() / mask.sum().clamp(min=1)).item()}
        if distillation.coefficient:
            over = self._teacher_over_policy(batch, policy_plan, old)
            mixed = distillation.reward_weight * estimate.advantages + distillation.coefficient * over
            estimate = replace(estimate, advantages=mixed)
            metrics["teacher_kl"] = (-over.sum() / mask.sum().clamp(min=1)).item()
        if values is not None and estimate.returns is not None:
            metrics |= target_metrics(mask, values, estimate.returns)
        return _Estimated(
            mask=mask,
            advantages=estimate.advantages,
            values=values,
            returns=estimate.returns,
            old_log_probs=old if self._several else None,
            metrics=metrics,
        )

    def _update(self, batch: ExperienceBatch, estimated: _Estimated, groups: Tensor | None = None) -> Update:
        """Plan the optimizer step on these groups, int64; None: on all."""
        mask, completions, completion_of_token = estimated.mask, batch.groups.numel(), batch.completion_of_token
        if groups is not None:
            chosen = torch.isin(batch.groups, groups)
            mask, completions = mask & chosen[completion_of_token], int(chosen.sum())
        weights = token_weights(
            self._algorithm.aggregation,
            mask,
            completion_of_token,
            completions=completions,
            length=self._max_new_tokens,
        )
        plan = self._plan(batch, mask, weights, estimated.advantages, skip=self._skip)
        targets = None
        if estimated.values is not None and estimated.returns is not None:
            critic_plan = plan
            if not self._joint:
                ones = torch.ones_like(weights)
                critic_plan = self._plan(batch, mask, weights, ones, skip=False, all_ranks=True)
            targets = CriticTargets(critic_plan, estimated.values, estimated.returns)
        return Update(replace(plan, old_log_probs=estimated.old_log_probs), targets)

    def _plan(
        self,
        batch: ExperienceBatch,
        mask: Tensor,
        weights: Tensor,
        advantages: Tensor,
        *,
        skip: bool,
        all_ranks: bool = False,
    ) -> StepPlan:
        """This rank's share of the batch among the data-parallel ranks, or for a separate critic among all ranks."""
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
        """The old policy's KL, float64 [T], 0 outside the mask; None if no KL is taken from the reward."""
        if not self._kl_in_reward:
            return None
        old = batch.rollout_log_probs.double() if old is None else old
        reference = self._for_all_tokens(batch, plan, self._plugin.reference_log_probs)
        return torch.where(plan.mask, KL_ESTIMATORS[self._algorithm.kl_estimator](old, reference), 0.0)

    def _teacher_over_policy(self, batch: ExperienceBatch, plan: StepPlan, old: Tensor | None) -> Tensor:
        """log teacher - log policy of each token, float64 [T], 0 outside the mask.

        Its mean under the policy is minus the reverse KL, so as advantage of the token alone (a discount of 0) it
        follows the gradient of that (Gu et al. 2023, arXiv:2306.08543; Agarwal et al. 2023, arXiv:2306.13649).
        """
        own = batch.rollout_log_probs.double() if old is None else old
        if batch.teacher_log_probs is not None:
            teacher = batch.teacher_log_probs.double()
        else:
            teacher = self._for_all_tokens(batch, plan, self._plugin.reference_log_probs)
        return torch.where(plan.mask, teacher - own, 0.0)

    def _for_all_tokens(
        self, batch: ExperienceBatch, plan: StepPlan, forward: Forward, *, by_policy: bool = True, numbers: int = 1
    ) -> Tensor:
        """Compute `forward` for every trained token of the global batch: float64 [T] on the CPU, 0 for other tokens.

        Args:
            batch, plan: the batch, and this rank's share of it.
            forward: see `Forward`.
            by_policy: whether it is the plugin's. Then one of the ranks with the same tokens contributes its result,
                and if every pass is collective, a rank that has run out of micro-batches repeats its last.
            numbers: per token; more than one: the result is [numbers, T].
        """
        device, count = self._plugin.ranks.device, len(plan.micro_batches)
        counts = self._plugin.counts or not by_policy
        found = torch.zeros(numbers, batch.rows.numel(), dtype=torch.float64, device=device)
        for index in range(self._plugin.passes(count) if by_policy else count):
            micro_batch = collate(batch, plan, plan.micro_batches[min(index, count - 1)]).to(device, self._plugin.dtype)
            PROGRESS.advance()
            with torch.no_grad():
                values = forward(micro_batch)
            if not plan.idle and counts:
                found[:, micro_batch.tokens] = values.double()
        found = distributed.sum_over_ranks(found).cpu()
        return found if numbers > 1 else found[0]
