"""One rank's micro-batches of a step: their losses, their gradients, and the sums that become metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.algorithms import Algorithm
from quartet_trainer.batches import ExperienceBatch, MicroBatch, StepPlan, collate
from quartet_trainer.learner.head_critic import HeadCritic
from quartet_trainer.learner.metrics import SUMS
from quartet_trainer.learner.objective import Objective
from quartet_trainer.learner.planner import CriticTargets
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner.ptx import PretrainingTexts
from quartet_trainer.learner_settings import LearnerSettings


class Accumulator:
    """Adds the gradient of a step's loss to the parameters, micro-batch by micro-batch.

    Every token comes with its final weight, so the loss is a plain sum over micro-batches and ranks.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        algorithm: Algorithm,
        plugin: Plugin,
        texts: PretrainingTexts | None = None,
        head: HeadCritic | None = None,
    ) -> None:
        """Take the plugin with its model spread, the reference model too where there is a KL, PTX's texts, the head."""
        self._objective = Objective(settings, algorithm)
        self._plugin = plugin
        self._texts = texts
        self._head = head
        self._ptx = settings.ptx.coefficient
        self._device = plugin.ranks.device
        self._dtype = torch.float64 if settings.precision == "fp64" else torch.float32

    def run(
        self, batch: ExperienceBatch, plan: StepPlan, step: int = 0, targets: CriticTargets | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Forward and backward of this rank's micro-batches: first those of PTX's texts of this step, then the plan's.

        `targets` are what a value head learns, if there is one.

        Returns:
            This rank's sums, float64 in the order of `metrics.SUMS`, and its peaks by name.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._device)
        peak = zero = torch.zeros((), dtype=self._dtype, device=self._device)

        texts: list[MicroBatch] = []
        if self._texts is not None:
            texts = self._texts.micro_batches(step, self._plugin.data_rank, self._plugin.data_size)

        def load(index: int) -> MicroBatch:
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
                # DDP and ZeRO want a gradient of every parameter, also where it is 0.
                return self._ptx * text_loss + (0.0 if values is None else 0.0 * values.sum())
            loss, micro_sums, micro_peak = self._objective(micro_batch, log_probs, entropy, reference)
            if self._head is not None and values is not None and targets is not None:
                value_loss, value_sums = self._head.loss(micro_batch, values, targets)
                loss, micro_sums = loss + value_loss, micro_sums | value_sums
            if not plan.idle and self._plugin.counts:
                completions = plan.micro_batches[index - len(texts)]
                whole = int(batch.prompt_lengths[completions].sum() + batch.completion_lengths[completions].sum())
                forward = micro_batch.input_ids.numel()
                real = forward if micro_batch.packing else whole
                sizes = {"forward_tokens": forward, "real_tokens": real, "micro_batches": 1}
                sizes["shared_prompt_tokens"] = whole - real
                micro_sums |= {name: torch.as_tensor(float(size)) for name, size in sizes.items()}
                sums = sums + torch.stack([micro_sums.get(name, zero).to(sums) for name in SUMS])
                peak = torch.maximum(peak, micro_peak)
            return (1 - self._ptx) * loss

        seconds = self._plugin.accumulate(len(texts) + len(plan.micro_batches), load, criterion)
        return sums, {
            "log_prob_diff_max": peak.item(),
            "forward_seconds": seconds.forward,
            "backward_seconds": seconds.backward,
        }
