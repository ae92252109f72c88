"""How far `hybrid_parallel` can spread a model, by its config.json. Imports no torch."""

from __future__ import annotations

from typing import Any

from quartet_trainer.errors import LearnerError
from quartet_trainer.plugin_settings import PluginSettings

_OWN_ATTENTION = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping")
"""Keys of config.json by which attention is another than causal attention over the whole sequence."""


def check_ranks(settings: PluginSettings, ranks: int) -> None:
    """Raise LearnerError if so many ranks cannot be divided as the settings say."""
    tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
    if ranks % (tp * pp * sp):
        third = f" * trainer.sp_size {sp}" if sp > 1 else ""
        raise LearnerError(
            f"trainer.tp_size {tp} * trainer.pp_size {pp}{third} must divide the number of ranks, {ranks}"
        )


def check_sampling_masks(settings: PluginSettings, sampling_masks: bool) -> None:
    """Raise LearnerError for masks with a vocabulary that ranks share."""
    if sampling_masks and settings.plugin == "hybrid_parallel":
        raise LearnerError(
            "run.sampling_masks is not possible with trainer.plugin 'hybrid_parallel', whose ranks share the "
            "vocabulary; allowed: another plugin, or false"
        )


def check_model(config: Any, settings: PluginSettings) -> None:
    """Check that a model can be spread as the settings say.

    Args:
        config: transformers' PretrainedConfig, or the attributes that config.json has.

    Raises:
        LearnerError: it cannot.
    """
    tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        value = getattr(config, name, None)
        if value is None:  # a default of transformers
            continue
        if value % tp:
            raise LearnerError(f"trainer.tp_size {tp} does not divide the model's {name}, {value}")
        if "heads" in name and value // tp % sp:
            raise LearnerError(
                f"trainer.tp_size {tp} * trainer.sp_size {sp} does not divide the model's {name}, {value}"
            )
    if config.num_hidden_layers < pp:
        raise LearnerError(f"trainer.pp_size {pp} is more than the model's {config.num_hidden_layers} layers")
    own = [name for name in _OWN_ATTENTION if getattr(config, name, None)]
    if not getattr(config, "use_sliding_window", True):
        own = [name for name in own if name != "sliding_window"]
    if settings.sequence_parallel and own:
        raise LearnerError(
            f"trainer.sequence_parallel is not possible with this model's attention, which has {own[0]} in config.json"
        )
