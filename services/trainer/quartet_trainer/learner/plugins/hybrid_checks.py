"""Which models `hybrid_parallel` can spread, and how far."""

from __future__ import annotations

from transformers import PretrainedConfig

from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.plugin_settings import PluginSettings

FAMILIES = ("qwen2", "llama")
"""Model types of which ColossalAI's sharding was run here."""


def check_model(config: PretrainedConfig, settings: PluginSettings) -> None:
    """Raise LearnerError if a model of this configuration cannot be spread as the settings say."""
    tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
    if config.model_type not in FAMILIES:
        raise LearnerError(
            f"plugin 'hybrid_parallel' is tried with {', '.join(FAMILIES)} models, not with {config.model_type!r}; "
            "use plugin 'torch_ddp'"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        value = getattr(config, name)
        if value % tp:
            raise LearnerError(f"trainer.tp_size {tp} does not divide the model's {name}, {value}")
        if "heads" in name and value // tp % sp:
            raise LearnerError(
                f"trainer.tp_size {tp} * trainer.sp_size {sp} does not divide the model's {name}, {value}"
            )
    if config.num_hidden_layers < pp:
        raise LearnerError(f"trainer.pp_size {pp} is more than the model's {config.num_hidden_layers} layers")
    if getattr(config, "use_sliding_window", False) and (pp > 1 or settings.sequence_parallel):
        raise LearnerError(
            "the model's attention has a sliding window, which pipeline and sequence parallelism would leave out; "
            "allowed with such a model: trainer.pp_size 1, no trainer.sequence_parallel"
        )
