"""The loss of a micro-batch from its log-probs: the algorithm's parts put together, and sums that become metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.algorithms import Algorithm
from quartet_trainer.algorithms.losses import KL_ESTIMATORS, importance_ratio, k3
from quartet_trainer.batches import MicroBatch
from quartet_trainer.learner_settings import LearnerSettings


class Objective:
    """weight * (correction * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy), summed over tokens.

    Knows nothing of models, ranks or plugins; tokens come with their final weights, so parts of a batch add up.
    """

    def __init__(self, settings: LearnerSettings, algorithm: Algorithm) -> None:
        """Take `old_log_probs` and the coefficients from the settings, the rest from the algorithm."""
        self._settings = settings
        self._algorithm = algorithm
        self._kl = KL_ESTIMATORS[algorithm.kl_estimator]

    def __call__(
        self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This micro-batch's part of the batch's loss, its sums by name, and its greatest log-prob difference.

        Args:
            micro_batch: on the training device.
            log_probs: float [t], with gradient.
            entropy: float [t], with gradient where `entropy_coefficient` > 0.
            reference: float [t], the reference model's log-probs; None unless the KL is in the loss.
        """
        settings, weights = self._settings, micro_batch.weights
        current, rollout = log_probs.detach(), micro_batch.rollout_log_probs
        old = rollout
        if settings.ratio_to == "recompute":
            # With one optimizer step a batch, the trainer's log-probs before it are those of this very pass.
            old = current if micro_batch.old_log_probs is None else micro_batch.old_log_probs

        tokens = self._algorithm.policy_loss(log_probs, old, micro_batch.advantages, micro_batch.sequences)
        correction = torch.ones_like(current)
        if self._algorithm.correction is not None:
            correction = self._algorithm.correction(old, rollout, micro_batch.sequences)
        policy_loss = (weights * correction * tokens.loss).sum()
        kl = torch.zeros_like(current) if reference is None else self._kl(log_probs, reference)
        loss = policy_loss
        if reference is not None:
            loss = loss + settings.kl_coefficient * (weights * kl).sum()
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * (weights * entropy).sum()

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
