"""ColossalAI's plugins behind one interface, `Plugin`."""

from __future__ import annotations

from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.plugins.base import DataParallel, Plugin
from quartet_trainer.learner.plugins.fsdp import TorchFsdp
from quartet_trainer.learner.plugins.zero import LowLevelZero
from quartet_trainer.learner_settings import LearnerSettings

__all__ = ["Plugin", "create_plugin"]


def create_plugin(settings: LearnerSettings, ranks: Ranks) -> Plugin:
    """Make the plugin of `settings`. All ranks call."""
    if settings.plugin == "hybrid_parallel":
        # Its shardformer imports every model family that it supports, which takes seconds.
        from quartet_trainer.learner.plugins.hybrid import HybridParallel

        return HybridParallel(settings, ranks)
    if settings.plugin == "low_level_zero":
        return LowLevelZero(settings, ranks)
    if settings.plugin == "gemini":
        from quartet_trainer.learner.plugins.gemini import Gemini

        return Gemini(settings, ranks)
    if settings.plugin == "torch_fsdp":
        return TorchFsdp(settings, ranks)
    return DataParallel(settings, ranks)
