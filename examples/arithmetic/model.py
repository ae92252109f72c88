"""A Qwen2-architecture model of 312,000 parameters and its tokenizer, one token per character.

Run with the trainer's environment.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY_SIZE = 128
END = "<|endoftext|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer without merges: one token for each printable character and each tag.

    A WordLevel tokenizer would be simpler, but with a qwen2 config.json AutoTokenizer loads it as a different class
    with different ids.
    """
    # ByteLevel writes the space as Ġ and the newline as Ċ.
    characters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127))]
    vocabulary = {END: 0}
    for tag in TAGS:
        vocabulary[tag] = len(vocabulary)
    for character in characters:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Return a freshly initialized float32 model."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            # With the default of 0.02, which suits wide layers, learning does not start at this width.
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            use_sliding_window=False,
            sliding_window=None,
            dtype=torch.float32,
        )
    )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder."""
    model.generation_config.eos_token_id = 0
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
