"""A tiny random Qwen2 on disk, as transformers 4.51 writes it, with a byte-level tokenizer of single characters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<eos>", "<pad>", "<think>", "</think>", "<answer>", "</answer>", "\\boxed{"]
VOCAB_SIZE = 128
EOS = 95


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + n / 8 for n in range(16)],
    "long_factor": [9.0] * 16,
    "original_max_position_embeddings": 512,
}


def config_dict(tied: bool, **changes: object) -> dict:
    """config.json in the 4.51 form: rope_theta at the top level. Untied embeddings come with longrope frequencies."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": EOS,
        "hidden_size": 128,
        "initializer_range": 0.08,
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_scaling": None if tied else LONGROPE,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "transformers_version": "4.51.3",
        "vocab_size": VOCAB_SIZE,
        **changes,
    }


def write_model(folder: Path, *, tied: bool, seed: int, **changes: object) -> Path:
    """Write a random model; equal seeds give equal weights. `changes`: of its config.json."""
    from transformers import AutoModelForCausalLM, Qwen2Config  # Seconds, which the sender does not need to spend.

    folder.mkdir(parents=True, exist_ok=True)
    config = config_dict(tied, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "transformers_version": "4.51.3"}))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**config), dtype=getattr(torch, config["torch_dtype"]))
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a folder, by their Hugging Face names."""
    return load_file(folder / "model.safetensors")


def _write_tokenizer(folder: Path) -> None:
    # Byte-level BPE without merges: one token per printable character. AutoTokenizer, reading qwen2 from config.json,
    # loads it as such and gives the same ids; a WordLevel tokenizer would be loaded as another class.
    vocab = {chr(code) if code != 32 else "Ġ": code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[:2]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIAL[2:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 512,
            }
        )
    )
