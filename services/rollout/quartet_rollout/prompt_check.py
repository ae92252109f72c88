"""Checks the prompts of the data before the rollout starts: their lengths, templates and special tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.chats import from_json, to_chat, turns_of
from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.log import get_logger
from quartet_common.run_spec import run_spec
from quartet_common.sampling import SamplingSection
from quartet_common.tensors import encode
from quartet_rollout.config import RolloutSection
from quartet_rollout.engines.model_folder import load_tokenizer
from quartet_rollout.generation import PromptRefused, sampling_values
from quartet_rollout.prompts import PromptReader, room_for_prompt
from quartet_server.data_rows import data_rows, sections_of_rows

log = get_logger(__name__)


def check_prompts(config: LoadedConfig, max_model_len: int | None) -> None:
    """Read the prompts of [data] as the rollout will, those that may be too long and one chat of each kind.

    The client checks files that are not on this host, and lines that are no prompts.

    Raises:
        ConfigError: with files and lines, a prompt leaves no room for a completion, or the chat template refuses it.
    """
    folder = config.model.path
    assert folder is not None
    sizes_of_model = json.loads((folder / "config.json").read_text())
    vocabulary = sizes_of_model.get("vocab_size")
    _check_sampling(config, vocabulary)
    context = max_model_len or sizes_of_model.get("max_position_embeddings")
    if not (folder / "tokenizer.json").is_file() or not context:
        return
    spec = run_spec(config.run)
    run = config.run
    for key, sampling in (("sampling", run.sampling), ("evaluation_sampling", run.evaluation_sampling)):
        given = sampling and "max_new_tokens" in sampling.model_fields_set
        # Without data the run is another file's, of which this one need not say anything.
        if sampling and (given or (sampling is run.sampling and config.data.get("train"))):
            try:
                room_for_prompt(sampling.max_new_tokens, spec, context)
            except PromptRefused as error:
                raise ConfigError(f"run.{key}.max_new_tokens: got {error.came}; allowed: {error.allowed}") from error
    readers: list[PromptReader] = []
    found: dict[str, str] = {}  # the first problem of each field
    sizes: dict[tuple[object, ...], float] = {}  # tokens per message, of the first chat of each kind
    for where, row in data_rows(config.data):
        prompt = _prompt(row)
        if prompt is None:
            continue
        try:
            if prompt.HasField("token_ids") and vocabulary and (last := max(row["token_ids"])) >= vocabulary:
                raise PromptRefused("prompt.token_ids", last, f"below {vocabulary}, the model's vocab_size")
            wanted = sampling_values(prompt, spec, experience_pb2.PURPOSE_TRAIN).get("max_new_tokens", 0)
            room, _ = room_for_prompt(wanted, spec, context)
            kind, turns = _kind(prompt.chat), len(prompt.chat.messages)
            # There are at most as many tokens as bytes.
            most = len(spec.system_prompt) + prompt.ByteSize() + sizes.get(kind, 0) * (turns + 1)
            if (most <= room or config.run.long_prompts == "truncate_left") and (not turns or kind in sizes):
                continue
            token_ids = _read_prompt(readers, folder, context, prompt, spec)
            sizes.setdefault(kind, token_ids.size / max(turns, 1))
        except PromptRefused as error:
            found.setdefault(error.field, f"{where}: {error}")
    if found:
        raise ConfigError(*found.values())


def _check_sampling(config: LoadedConfig, vocabulary: int | None) -> None:
    """Refuse what no engine can honor: token ids that the model lacks, and a minimum above the maximum of tokens."""
    run = config.run
    named = [("run.sampling", run.sampling), ("run.evaluation_sampling", run.evaluation_sampling)]
    for key, sampling in (*named, *sections_of_rows(config.data, "sampling", SamplingSection)):
        if sampling is None:
            continue
        for name in ("stop_token_ids", "logit_bias"):
            if vocabulary and (last := max(getattr(sampling, name), default=0)) >= vocabulary:
                raise ConfigError(f"{key}.{name}: got {last}; allowed: below {vocabulary}, the model's vocab_size")
        least, most = (
            getattr(sampling if name in sampling.model_fields_set else run.sampling, name)
            for name in ("min_tokens", "max_new_tokens")
        )
        if least > most:
            raise ConfigError(f"{key}.min_tokens: got {least}; allowed: at most max_new_tokens, {most}")


def _read_prompt(
    readers: list[PromptReader], folder: Path, context: int, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec
) -> np.ndarray:
    """Read a prompt with the first of the readers, made if there is none.

    Importing the tokenizer's own class may take ten seconds, so it only confirms what the general one refuses: it may
    know special tokens that are in no file.
    """
    if not readers:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        readers.append(PromptReader(tokenizer, context))
    try:
        return readers[0].read(prompt, spec, experience_pb2.PURPOSE_TRAIN)[0]
    except PromptRefused:
        if len(readers) == 1:
            readers.append(PromptReader(load_tokenizer(str(folder)), context))
        readers.reverse()
        return readers[0].read(prompt, spec, experience_pb2.PURPOSE_TRAIN)[0]


def _prompt(row: dict[str, Any]) -> experience_pb2.Prompt | None:
    """Return the text, chat or token ids of a row; None if it has none of them."""
    try:
        sampling = {key: value for key, value in (row.get("sampling") or {}).items() if value is not None}
        prompt = experience_pb2.Prompt(sampling=experience_pb2.SamplingParams(**sampling))
        if isinstance(row.get("prompt"), str):
            prompt.text = row["prompt"]
        elif row.get("messages"):
            tools, arguments = from_json(row.get("tools")), from_json(row.get("chat_template_kwargs"))
            prompt.chat.CopyFrom(to_chat(turns_of(row["messages"]), tools, arguments))
        elif row.get("token_ids"):
            prompt.token_ids.CopyFrom(encode(np.asarray(row["token_ids"], dtype=np.int32)))
        return prompt if prompt.WhichOneof("input") else None
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return None


def _kind(chat: experience_pb2.Chat) -> tuple[object, ...]:
    """Return what decides which parts of a template render a chat."""
    roles = tuple((turn.role, *json.loads(turn.template_fields or "{}")) for turn in chat.messages)
    return (roles, chat.template_arguments, bool(chat.tools))


def warn_of_missing_special_token(config: LoadedConfig[RolloutSection]) -> None:
    """Warn of a text prompt that lacks the special token with which the model's texts begin."""
    assert config.model.path is not None, "it was checked"
    tokenizer = config.model.path / "tokenizer.json"
    if config.run.add_special_tokens or not tokenizer.is_file():
        return
    from tokenizers import Tokenizer

    try:
        tokens = Tokenizer.from_file(str(tokenizer))
        encoded = tokens.encode("a")
    except Exception as error:  # the library raises no other
        raise ConfigError(f"model.path: '{tokenizer}' cannot be read: {error}") from error
    size = json.loads((config.model.path / "config.json").read_text()).get("vocab_size")
    if size and (last := max(tokens.get_vocab(with_added_tokens=False).values(), default=0)) >= size:
        raise ConfigError(
            f"model.path: '{tokenizer}' has tokens up to {last}, and vocab_size in config.json is {size}; copy the "
            "tokenizer of this model"
        )
    if not any(encoded.special_tokens_mask[:1]):
        return
    for where, row in data_rows(config.data, "prompt"):
        if isinstance(row["prompt"], str) and not row["prompt"].startswith(encoded.tokens[0]):
            log.warning(
                "%s: texts of this model begin with '%s', and this prompt will not; set run.add_special_tokens = true",
                where,
                encoded.tokens[0],
            )
            return
