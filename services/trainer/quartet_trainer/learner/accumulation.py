"""One rank's micro-batches of a step: their losses, their gradients, and the sums that become metrics."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from colossalai.booster import Booster
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor

from quartet_trainer.algorithms import Algorithm
from quartet_trainer.batches import ExperienceBatch, MicroBatch, StepPlan, collate
from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.metrics import SUMS
from quartet_trainer.learner.policy import Policy
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.correction import truncated_importance_weight
from quartet_trainer.losses.kl import k3
from quartet_trainer.losses.policy import importance_ratio


class Accumulator:
    """Adds the gradient of a step's loss to the parameters, micro-batch by micro-batch.

    Every token comes with its final weight, so the loss is a plain sum over micro-batches and ranks. The ranks
    exchange gradients once, in the last backward; as that averages over ranks, the loss is multiplied by their number.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        algorithm: Algorithm,
        booster: Booster,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        reference: Policy | None,
        ranks: Ranks,
    ) -> None:
        """Take the boosted model and optimizer, and the reference model where `kl_coefficient` > 0."""
        self._settings = settings
        self._algorithm = algorithm
        self._booster = booster
        self._model = model
        self._optimizer = optimizer
        self._reference = reference
        self._ranks = ranks
        self._dtype = torch.float64 if settings.precision == "fp64" else torch.float32

    def run(self, batch: ExperienceBatch, plan: StepPlan) -> tuple[Tensor, dict[str, float]]:
        """Forward and backward of this rank's micro-batches.

        Returns:
            This rank's sums, float64 in the order of `metrics.SUMS`, and its peaks by name.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._ranks.device)
        peak = torch.zeros((), dtype=self._dtype, device=self._ranks.device)
        forward_seconds = backward_seconds = 0.0
        for index, completions in enumerate(plan.micro_batches):
            is_last = index == len(plan.micro_batches) - 1
            started = self._clock()
            micro_batch = collate(batch, plan, completions).to(self._ranks.device, self._dtype)
            with nullcontext() if is_last else self._booster.no_sync(self._model, self._optimizer):
                loss, micro_sums, micro_peak = self._loss(micro_batch)
                forward_ended = self._clock()
                self._booster.backward(loss * self._ranks.world_size, self._optimizer)
            backward_ended = self._clock()
            forward_seconds += forward_ended - started
            backward_seconds += backward_ended - forward_ended
            if not plan.idle:
                real = batch.prompt_lengths[completions].sum() + batch.completion_lengths[completions].sum()
                sizes = {"forward_tokens": micro_batch.input_ids.numel(), "real_tokens": real, "micro_batches": 1}
                micro_sums |= {name: torch.as_tensor(float(size)) for name, size in sizes.items()}
                sums += torch.stack([micro_sums[name].to(sums) for name in SUMS])
                peak = torch.maximum(peak, micro_peak)
        return sums, {
            "log_prob_diff_max": peak.item(),
            "forward_seconds": forward_seconds,
            "backward_seconds": backward_seconds,
        }

    def _loss(self, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This micro-batch's part of the batch's loss, its sums, and its greatest log-prob difference."""
        settings = self._settings
        inputs = (
            micro_batch.input_ids,
            micro_batch.rows,
            micro_batch.columns,
            micro_batch.targets,
            micro_batch.temperatures,
        )
        log_probs, entropy = self._model(*inputs)
        current = log_probs.detach()
        rollout = micro_batch.rollout_log_probs
        # A batch is trained by one optimizer step, so the trainer's log-probs before it are those of this very pass.
        recompute = settings.old_log_probs == "recompute"
        old = current if recompute else rollout

        tokens = self._algorithm.policy_loss(log_probs, old, micro_batch.advantages)
        if recompute and settings.tis_cap > 0:
            correction = truncated_importance_weight(old, rollout, settings.tis_cap)
        else:
            correction = torch.ones_like(current)
        policy_loss = (micro_batch.weights * correction * tokens.loss).sum()
        if self._reference is None:
            kl = torch.zeros_like(current)
            loss, weighted_kl = policy_loss, torch.zeros_like(policy_loss)
        else:
            with torch.no_grad():
                reference, _ = self._reference(*inputs)
            kl = k3(log_probs, reference)
            weighted_kl = (micro_batch.weights * kl).sum()
            loss = policy_loss + settings.kl_coefficient * weighted_kl

        with torch.no_grad():
            importance = importance_ratio(current, rollout)
            difference = (current - rollout).abs()
            sums = {
                "policy_loss": policy_loss,
                "weighted_kl": weighted_kl,
                "kl": kl.sum(),
                "entropy": entropy.sum(),
                "approx_kl": k3(old, current).sum(),
                "clip_ratio_low": tokens.clipped_low.sum(),
                "clip_ratio_high": tokens.clipped_high.sum(),
                "ratio_mean": tokens.ratio.sum(),
                "log_prob_diff_mean": difference.sum(),
                "mismatch_kl": k3(rollout, current).sum(),
                "tis_weight_mean": correction.sum(),
                "importance": importance.sum(),
                "importance_squared": (importance**2).sum(),
                "computed_tokens": torch.as_tensor(float(current.numel())),
            }
            peak = difference.max() if difference.numel() else difference.sum()
        return loss, {name: value.detach() for name, value in sums.items()}, peak

    def _clock(self) -> float:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        return time.perf_counter()
