"""TorchDDPPlugin: every rank holds the whole model and takes its share of the batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from torch import Tensor
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.model import Policy
from quartet_trainer.learner.plugins.base import CreateOptimizer, Criterion, Load, Phases, Plugin, Seconds
from quartet_trainer.learner_settings import LearnerSettings


class DataParallel(Plugin):
    """The ranks exchange gradients once a step, in the last micro-batch's backward."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        super().__init__(
            settings, ranks, Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True, broadcast_buffers=False))
        )
        self._autocast = torch.bfloat16 if settings.precision == "bf16" else None
        self._has_reference = False
        self._reference: Policy

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        policy = Policy(
            causal_lm,
            self._autocast,
            entropy_gradient=self.settings.entropy_coefficient > 0,
            value_head=self.value_head,
            router=self.router,
        )
        self.causal_lm = causal_lm
        self.model, self.optimizer, *_ = self.booster.boost(policy, create_optimizer(policy))

    def keep_reference(self, load: Callable[[], PreTrainedModel]) -> None:
        """Not boosted: DDP has nothing to do for a model without gradients. Under an adapter it is there already."""
        self._has_reference = True
        if self.adapter is None:
            reference = Policy(load(), self._autocast)
            self._reference = reference.to(self.ranks.device).eval().requires_grad_(False)

    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """See `Plugin.log_probs`."""
        with torch.no_grad():
            log_probs, *_ = self.model.unwrap()(*micro_batch.inputs)
        return log_probs

    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """See `Plugin.reference_log_probs`."""
        if self.adapter is not None:
            with self.adapter.disabled():
                return self.log_probs(micro_batch)
        with torch.no_grad():
            log_probs, *_ = self._reference(*micro_batch.inputs)
        return log_probs

    def accumulate(self, count: int, load: Load, criterion: Criterion) -> Seconds:
        phases = Phases(self.ranks.device)
        for index in range(count):
            is_last = index == count - 1
            phases.begin("forward")
            micro_batch = load(index)
            with nullcontext() if is_last else self.booster.no_sync(self.model, self.optimizer):
                log_probs, entropy, *values = self.model(*micro_batch.inputs)
                reference = None
                if self._has_reference and self.reference_in_loss:
                    reference = self.reference_log_probs(micro_batch)
                loss = criterion(index, micro_batch, log_probs, entropy, reference, *values)
                phases.begin("backward")
                # DDP averages over the ranks; every token has its final weight already.
                self.booster.backward(loss * self.data_size, self.optimizer)
        return Seconds(**phases.end())
