"""A Prompt as the token ids that the model sees. What follows is tokens in, tokens out: nothing is tokenized twice."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, tensor_pb2

from quartet_common.tensors import decode
from quartet_rollout.sampling import (
    Draw,
    PromptRefused,
    completions_per_prompt,
    new_tokens_wanted,
    sampling_layers,
    settings_of,
)
from quartet_rollout.shortening import shorten_chat, shorten_tokens
from quartet_rollout.telemetry import SHORTENED
from quartet_rollout.texts import LONG_BYTES, Texts


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, tokenizer: Any, max_model_len: int):
        """`tokenizer` is the model's transformers tokenizer, `max_model_len` its context in tokens."""
        self._tokenizer = tokenizer
        self._texts = Texts(tokenizer)
        self._max_model_len = max_model_len
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")

    async def read_in_turn(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
    ) -> tuple[np.ndarray, Draw]:
        """As `read`; a long prompt is read in a thread, one at a time, while the event loop goes on."""
        if prompt.ByteSize() <= LONG_BYTES:
            return self.read(prompt, spec, purpose)
        return await asyncio.get_running_loop().run_in_executor(self._long, self.read, prompt, spec, purpose)

    def read(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
    ) -> tuple[np.ndarray, Draw]:
        """Return the prompt's tokens, int32 [P], and what is to be drawn.

        Raises:
            PromptRefused, PromptError: the prompt is empty, too long, malformed, or its sampling is out of range.
        """
        spec = spec if spec is not None else broker_pb2.RunSpec()
        layers = sampling_layers(prompt, spec, purpose)
        n = completions_per_prompt(prompt, spec, purpose)
        wanted = new_tokens_wanted(layers)
        token_ids = self.token_ids(prompt, spec.system_prompt)
        if spec.long_prompts == broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT:
            token_ids = self._shorten(prompt, token_ids, spec, wanted)
        max_new_tokens = self._fit(token_ids.size, wanted, spec.max_prompt_tokens)
        masks = spec.sampling_masks and purpose == experience_pb2.PURPOSE_TRAIN
        return token_ids, Draw(n, settings_of(layers, max_new_tokens, masks))

    def token_ids(self, prompt: experience_pb2.Prompt, system_prompt: str) -> np.ndarray:
        """Return the prompt's tokens, int32 [P], whatever their number but none."""
        form = prompt.WhichOneof("input")
        if form == "token_ids":
            token_ids = _given_ids(prompt.token_ids)
        elif form == "text":
            token_ids = self._texts.encode(prompt.text)
        elif form == "chat":
            token_ids = self._texts.encode(self._render(self._messages(prompt.chat, system_prompt)))
        else:
            raise PromptRefused("prompt.input", "nothing", "exactly one of chat, text, token_ids")
        if not token_ids.size:
            raise PromptRefused(f"prompt.{form}", "no tokens", "at least one token")
        return token_ids

    def text(self, token_ids: np.ndarray) -> str:
        """Return the text of tokens, special tokens included, exactly as they stand."""
        return self._texts.decode(token_ids.tolist())

    def _messages(self, chat: experience_pb2.Chat, system_prompt: str) -> list[dict[str, str]]:
        if not chat.messages:
            raise PromptRefused("prompt.chat.messages", "none", "at least one message")
        if getattr(self._tokenizer, "chat_template", "") is None:
            raise PromptRefused("prompt.chat", "a chat, and the model has no chat template", "text or token_ids")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        if system_prompt and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def _render(self, messages: list[dict[str, str]], generation_prompt: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a chat template is the model author's program and raises what it likes
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PromptRefused(
                "prompt.chat",
                f"what the model's chat template refuses ({reason})",
                "a chat it can render, text or token_ids",
            ) from error

    def _shorten(
        self, prompt: experience_pb2.Prompt, token_ids: np.ndarray, spec: broker_pb2.RunSpec, wanted: int
    ) -> np.ndarray:
        """Return the prompt's tokens, at most as many as `_fit` allows."""
        room = self._max_model_len - max(wanted, 1)
        if spec.max_prompt_tokens:
            room = min(room, spec.max_prompt_tokens)
        if token_ids.size <= room or room < 1:
            return token_ids  # without any room `_fit` says what is wrong
        SHORTENED.inc()
        if prompt.WhichOneof("input") == "chat":
            messages = self._messages(prompt.chat, spec.system_prompt)
            return shorten_chat(messages, room, self._render, self._texts.encode)
        return shorten_tokens(token_ids, room, getattr(self._tokenizer, "bos_token_id", None))

    def _fit(self, prompt_tokens: int, wanted: int, max_prompt_tokens: int) -> int:
        """Return max_new_tokens for a prompt of that many tokens, or refuse it as too long."""
        context = self._max_model_len
        if max_prompt_tokens and prompt_tokens > max_prompt_tokens:
            raise PromptRefused(
                "prompt.input", f"{prompt_tokens} tokens", f"at most {max_prompt_tokens}, the run's max_prompt_tokens"
            )
        room = context - max(wanted, 1)
        if prompt_tokens > room:
            raise PromptRefused(
                "prompt.input",
                f"{prompt_tokens} tokens",
                f"at most {max(room, 0)}: the model's context of {context} less max_new_tokens {max(wanted, 1)}",
            )
        return wanted or context - prompt_tokens


def _given_ids(tensor: tensor_pb2.Tensor) -> np.ndarray:
    try:
        array = decode(tensor)
    except ValueError as error:
        raise PromptRefused(
            "prompt.token_ids", f"a tensor that cannot be read ({error})", "int32, one dimension"
        ) from error
    if array.dtype != np.int32 or array.ndim != 1:
        raise PromptRefused("prompt.token_ids", f"{array.dtype} of {array.ndim} dimensions", "int32, one dimension")
    return array
