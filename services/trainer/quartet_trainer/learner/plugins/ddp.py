"""TorchDDPPlugin: every rank holds the whole model and computes its share of the batch."""

from __future__ import annotations

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from transformers import PreTrainedModel

from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.plugins.base import CreateOptimizer, Plugin
from quartet_trainer.learner_settings import LearnerSettings


class DataParallel(Plugin):
    """The ranks exchange gradients once a step, in the last micro-batch's backward."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        super().__init__(
            settings, ranks, Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True, broadcast_buffers=False))
        )
        self._autocast = torch.bfloat16 if settings.precision == "bf16" else None

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        policy = self._policy(causal_lm)
        self.causal_lm = causal_lm
        self.model, self.optimizer, *_ = self.booster.boost(policy, create_optimizer(policy))
