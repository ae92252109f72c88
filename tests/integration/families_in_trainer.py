"""Run with the trainer's environment: writes model folders, then computes log-probs of what engines made with them.

`python families_in_trainer.py FOLDER`. Once the folders are there it prints "ready". Each line it reads, {"family",
"tokens", "prompt"}, is answered by a line with the log-probs of the tokens after the first `prompt`; all is JSON.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from model import VOCABULARY_SIZE, build_tokenizer, save

from quartet_trainer.learner.model import Policy, load_causal_lm

SIZES = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "dtype": torch.float32,
}  # fmt: skip
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [9.0] * 16}
FAMILIES = {
    "Phi3": {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 32},
    "Llama": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "Qwen2": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "Gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "sliding_window": 16},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
}


def log_probs(folder: Path, tokens: list[int], prompt: int) -> list[float]:
    ids = torch.tensor([tokens])
    positions = torch.arange(prompt - 1, len(tokens) - 1)
    policy = Policy(load_causal_lm(folder, torch.float32, share_prompts=True).train())
    with torch.no_grad():
        rows = torch.zeros_like(positions)
        return policy(ids, rows, positions, None, ids[0, prompt:], torch.ones(len(positions)))[0].tolist()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for family, values in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES, **values)
        save(transformers.AutoModelForCausalLM.from_config(config), build_tokenizer(), folder / family)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(log_probs(folder / asked["family"], asked["tokens"], asked["prompt"])), flush=True)
