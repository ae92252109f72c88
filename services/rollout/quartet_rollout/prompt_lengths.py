"""Prompts that cannot fit the model, found before anything starts, where the run's data is on this host.

Whatever comes later by the broker is checked when it is read (`prompts`), and set aside as dead. A chat's length is
that of its contents here: the chat template adds to it, so what is refused is certainly too long.
"""

import json
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.data_rows import data_rows


def check_prompt_lengths(config: LoadedConfig, max_model_len: int | None) -> None:
    """Raise ConfigError, naming file and line, for the first prompt in [data] that leaves no room to answer.

    Files that are not here, and lines that are no prompts, are the client's business.
    """
    folder = config.model.path
    if config.run.long_prompts == "truncate_left":
        return
    if folder is None or not (folder / "tokenizer.json").is_file():
        return
    context = max_model_len or json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if not context:
        return
    sampling = config.run.sampling
    room = context - sampling.max_new_tokens
    why = f"the model's context of {context} less run.sampling.max_new_tokens ({sampling.max_new_tokens})"
    if 0 < config.run.max_prompt_tokens < room:
        room, why = config.run.max_prompt_tokens, "run.max_prompt_tokens"
    tokenizer: Any = None
    for where, row in data_rows(config.data):
        text = _text(row)
        if len(text.encode()) <= room:
            continue  # no tokenizer makes more tokens than bytes
        if tokenizer is None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens > room:
            raise ConfigError(f"{where}: the prompt has {tokens} tokens; allowed: at most {room}, {why}")


def _text(row: dict[str, Any]) -> str:
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    messages = row.get("messages") or []
    turns = messages if isinstance(messages, list) else [messages]
    return "".join(str(turn["content"]) for turn in turns if isinstance(turn, dict) and "content" in turn)
