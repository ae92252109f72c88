"""Runs with any version of transformers. `python models.py save FOLDER` writes tiny models, one subfolder each;
`python models.py log-probs FOLDER…` prints the log-probs of some tokens by each model as JSON.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_theta": 1e6, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
FAMILIES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Llama": {"rope_scaling": LLAMA3},
    "Phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "GPTNeoX": {"rotary_emb_base": 20_000, "rotary_pct": 0.5},
    "Gemma3Text": {"head_dim": 16, "rope_local_base_freq": 2e4, "sliding_window": 8, "sliding_window_pattern": 2},
}
"""Each with a non-default rotary embedding."""
TOKENS = torch.randint(3, 64, (1, 60), generator=torch.Generator().manual_seed(0))


def save(folder: Path) -> None:
    for family, values in FAMILIES.items():
        if not hasattr(transformers, f"{family}Config"):
            continue  # this version of transformers lacks it
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **values})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family, max_shard_size="60KB")


def log_probs(folder: str) -> list[float]:
    """Empty if this transformers cannot read the folder."""
    with suppress(Exception), torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).float().eval()(TOKENS).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(-1, TOKENS[0, 1:, None])[:, 0].tolist()
    return []


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    if what == "save":
        save(Path(folders[0]))
    else:
        print(json.dumps({folder: log_probs(folder) for folder in folders}))
