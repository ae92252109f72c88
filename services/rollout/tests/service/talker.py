"""A tiny model that has learned one conversation with a Python tool by heart."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen2Config

SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "21*2=?\n"
CALL = "```python\nprint(21*2)\n```\n"
OUTPUT = "```output\n42\n```\n"
LAST = "\\boxed{42}"
CONVERSATION = QUESTION + CALL + OUTPUT + LAST + "<eos>"


def write_talker(folder: Path) -> Path:
    """Train the model, a few seconds, and write its Hugging Face folder."""
    tokenizer = write_tokenizer(folder)
    ends = [tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<|im_end|>")]
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two that spin on a busy machine take ten times as long
    config = Qwen2Config(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=ends,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _learn(model, tokenizer.encode(CONVERSATION, add_special_tokens=False).ids)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    return folder


def _learn(model: torch.nn.Module, tokens: list[int], steps: int = 600, enough: float = 0.004) -> None:
    ids = torch.tensor([tokens])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        if loss.item() < enough:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model did not learn its conversation: loss {loss.item():.3f}")


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer and its chat template; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    # One token a byte, so that no text is out of its vocabulary; the special ones are single tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": False}))
    return tokenizer
