"""One rank's micro-batches of a step: their losses, their gradients, and the sums that become metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.algorithms.losses import KL_ESTIMATORS, importance_ratio, k3
from quartet_trainer.batch import ExperienceBatch, MicroBatch, StepPlan, collate
from quartet_trainer.learner.coefficients import Coefficients
from quartet_trainer.learner.critic import CriticTargets, HeadCritic
from quartet_trainer.learner.metrics import SUMS
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner.ptx import PretrainingTexts
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.progress import PROGRESS


class Accumulator:
    """Adds the gradient of a step's loss to the parameters, micro-batch by micro-batch.

    The loss is the sum over tokens of
    weight * (correction * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy).
    A token's weight is normalized over the global batch, so the sums of micro-batches and ranks add up to it.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        plugin: Plugin,
        coefficients: Coefficients,
        texts: PretrainingTexts | None,
        head: HeadCritic | None,
    ) -> None:
        """`plugin` is boosted and has the reference model, if any; `texts` are PTX's; `head` is a value head."""
        self._coefficients = coefficients
        self._algorithm = settings.algorithm
        self._kl = KL_ESTIMATORS[settings.algorithm.kl_estimator]
        self._plugin = plugin
        self._texts = texts
        self._head = head
        self._ptx = settings.ptx.coefficient
        self._device, self._dtype = plugin.ranks.device, plugin.dtype

    def run(
        self, batch: ExperienceBatch, plan: StepPlan, step: int = 0, targets: CriticTargets | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Run forward and backward of this rank's micro-batches: those of PTX's texts, then the plan's.

        `targets` are the value head's, if there is one.

        Returns:
            This rank's sums, float64 in the order of `metrics.SUMS`, and its peaks by name.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._device)
        peak = zero = torch.zeros((), dtype=self._dtype, device=self._device)

        texts: list[MicroBatch] = []
        if self._texts is not None:
            texts = self._texts.micro_batches(step, self._plugin.data_rank, self._plugin.data_size)

        def load(index: int) -> MicroBatch:
            PROGRESS.advance()
            if self._plugin.router:
                self._plugin.router.counts = index < len(texts) or not plan.idle
            if index < len(texts):
                return texts[index].to(self._device, self._dtype)
            return collate(batch, plan, plan.micro_batches[index - len(texts)]).to(self._device, self._dtype)

        def criterion(
            index: int,
            micro_batch: MicroBatch,
            log_probs: Tensor,
            entropy: Tensor,
            reference: Tensor | None,
            values: Tensor | None = None,
        ) -> Tensor:
            nonlocal sums, peak
            if index < len(texts):
                text_loss = -(micro_batch.weights * log_probs).sum()
                if self._plugin.counts:
                    sums[SUMS.index("ptx_loss")] += text_loss.detach()
                # DDP and ZeRO need a gradient for every parameter, even if it is 0.
                return self._ptx * text_loss + (0.0 if values is None else 0.0 * values.sum())
            loss, micro_sums, micro_peak = self._loss(micro_batch, log_probs, entropy, reference)
            if self._head is not None and values is not None and targets is not None:
                value_loss, value_sums = self._head.loss(micro_batch, values, targets)
                loss, micro_sums = loss + value_loss, micro_sums | value_sums
            if not plan.idle and self._plugin.counts:
                rows = plan.micro_batches[index - len(texts)]
                whole = int(batch.prompt_lengths[rows].sum() + batch.completion_lengths[rows].sum())
                forward = micro_batch.input_ids.numel()
                real = forward if micro_batch.packing else whole
                sizes = {"forward_tokens": forward, "real_tokens": real, "micro_batches": 1}
                sizes["shared_prompt_tokens"] = whole - real
                micro_sums |= {name: torch.as_tensor(float(size)) for name, size in sizes.items()}
                sums = sums + torch.stack([micro_sums.get(name, zero).to(sums) for name in SUMS])
                peak = torch.maximum(peak, micro_peak)
            return (1 - self._ptx) * loss

        seconds = self._plugin.accumulate(len(texts) + len(plan.micro_batches), load, criterion, len(texts))
        return sums, {
            "log_prob_diff_max": peak.item(),
            "forward_seconds": seconds["forward"],
            "backward_seconds": seconds["backward"],
        }

    def _loss(
        self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This micro-batch's part of the batch's loss, its sums by name, and its greatest log-prob difference.

        Args:
            micro_batch: on the training device.
            log_probs: float [t], with gradient.
            entropy: float [t], with gradient where the settings have a bonus.
            reference: float [t], the reference model's log-probs; None unless the KL is in the loss.
        """
        coefficients, weights = self._coefficients, micro_batch.weights
        current, rollout = log_probs.detach(), micro_batch.rollout_log_probs
        old = rollout
        if self._algorithm.old_log_probs == "recompute":
            # With one optimizer step a batch, the trainer's log-probs before it are those of this very pass.
            old = current if micro_batch.old_log_probs is None else micro_batch.old_log_probs

        tokens = self._algorithm.policy_loss(log_probs, old, micro_batch.advantages, micro_batch.sequences)
        correction = self._algorithm.correction_factors(old, rollout, micro_batch.sequences)
        policy_loss = (weights * correction * tokens.loss).sum()
        kl = torch.zeros_like(current) if reference is None else self._kl(log_probs, reference)
        loss = policy_loss
        if reference is not None:
            loss = loss + coefficients.kl * (weights * kl).sum()
        if coefficients.entropy:
            loss = loss - coefficients.entropy * (weights * entropy).sum()

        with torch.no_grad():
            importance = importance_ratio(current, rollout)
            difference = (current - rollout).abs()
            sums = {
                "loss": loss,
                "policy_loss": policy_loss,
                "kl": kl.sum(),
                "entropy": entropy.sum(),
                "approx_kl": k3(old, current).sum(),
                "clip_ratio_low": tokens.clipped_low.sum(),
                "clip_ratio_high": tokens.clipped_high.sum(),
                "ratio_mean": tokens.ratio.sum(),
                "log_prob_diff_mean": difference.sum(),
                "mismatch_kl": k3(rollout, current).sum(),
                "tis_weight_mean": correction.sum(),
                "dropped_ratio": (correction == 0).sum(),
                "importance": importance.sum(),
                "importance_squared": (importance**2).sum(),
                "computed_tokens": torch.as_tensor(float(current.numel())),
            }
            peak = difference.max() if difference.numel() else difference.sum()
        return loss, {name: value.detach() for name, value in sums.items()}, peak
