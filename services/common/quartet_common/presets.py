"""Named sets of defaults for the run file's `[trainer]`: what ColossalChat trains with, by its four algorithms' names.

The trainer fills in what a run file leaves out (`trainer.preset`); `quartet migrate-colossalchat` writes them down.
Sources: `rl_example.py` and `coati/distributed` of ColossalChat (April 2026); docs/colossalchat.md has them as a table.
"""

from types import MappingProxyType
from typing import Any, Literal

PresetName = Literal["colossalchat-grpo", "colossalchat-dapo", "colossalchat-reinforce-ppb", "colossalchat-rloo"]

# Settings of all its algorithms. Its Adam and its cosine schedule, which ends at 0.1 of the peak, have no flags.
_COMMON: dict[str, Any] = {
    "learning_rate": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "schedule": "cosine",
    "min_learning_rate_ratio": 0.1,
    "precision": "bf16",
    "gradient_checkpointing": True,
}
# All but DAPO: the mean of completions' means, and the KL to the first weights by k3.
_SAMPLE_LEVEL = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence-mean-token-mean", "kl_estimator": "k3"}
_WITH_KL = {**_COMMON, "kl_coefficient": 0.01}

TRAINER_PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "colossalchat-grpo": {"algorithm": {"name": "grpo", **_SAMPLE_LEVEL, "kl_in": "loss"}, **_WITH_KL},
        "colossalchat-dapo": {
            "algorithm": {"name": "dapo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
            **_COMMON,
            "kl_coefficient": 0.0,
        },
        # The KL of each token is taken from its advantage, and is not in the loss.
        "colossalchat-reinforce-ppb": {
            "algorithm": {"name": "reinforce_pp_baseline", **_SAMPLE_LEVEL, "kl_in": "reward"},
            **_WITH_KL,
        },
        "colossalchat-rloo": {"algorithm": {"name": "rloo", **_SAMPLE_LEVEL, "kl_in": "loss"}, **_WITH_KL},
    }
)
"""Keys of `[trainer]` and their values, by preset."""


def with_preset(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `[trainer]`, completed by those of the preset that they name.

    The preset's keys of its algorithm apply to that algorithm only. An unknown preset changes nothing here: validation
    of the section reports it.
    """
    preset = TRAINER_PRESETS.get(str(values.get("preset")))
    if preset is None:
        return values
    theirs, written = preset["algorithm"], values.get("algorithm", {})
    table = {"name": written} if isinstance(written, str) else written
    if isinstance(table, dict) and table.get("name", theirs["name"]) == theirs["name"]:
        written = {**theirs, **table}
    return {**preset, **values, "algorithm": written}
