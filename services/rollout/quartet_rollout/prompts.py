"""Converts a Prompt to the model's token ids, once: later steps use only token ids.

With `truncate_left`, prompts that are too long are truncated at their beginning. A chat keeps its system message, with
the text that the chat template puts before the first turn, and the generation prompt at its end. Its oldest turns are
removed whole, so that the rest begins with a turn of the first turn's role. If even the last such turn is too long, its
beginning is cut off, after its header. Text and token ids lose their first tokens, but keep a beginning-of-sequence
token.
"""

import asyncio
import os
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, tensor_pb2

from quartet_common.tensors import decode
from quartet_common.text import encodable
from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.generation import GenerationRequest, PromptRefused, sampling_values
from quartet_rollout.metrics import SHORTENED

LONG_BYTES = 1 << 16
"""A longer prompt is read in a thread, not in the event loop."""

_MOST_COMPLETIONS = 1024

Message = dict[str, str]


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, tokenizer: Any, max_model_len: int):
        """`tokenizer` is the model's transformers tokenizer, `max_model_len` its context in tokens.

        The tokenizer must not be shared: this calls it from two threads, and options of a call stay set in it.
        """
        self._tokenizer = tokenizer
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._max_model_len = max_model_len
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")

    async def read_in_turn(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
    ) -> tuple[np.ndarray, GenerationRequest]:
        """As `read`, but long prompts are read in a thread, one at a time, so that they do not block the event loop."""
        if prompt.ByteSize() <= LONG_BYTES:
            return self.read(prompt, spec, purpose)
        return await asyncio.get_running_loop().run_in_executor(self._long, self.read, prompt, spec, purpose)

    def read(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
    ) -> tuple[np.ndarray, GenerationRequest]:
        """Return the prompt's tokens, int32 [P], and the request for its completions.

        Raises:
            PromptRefused, PromptError: the prompt is empty, too long, malformed, or its sampling is out of range.
        """
        spec = spec if spec is not None else broker_pb2.RunSpec()
        values = sampling_values(prompt, spec, purpose)
        n, wanted = values.pop("n"), values.pop("max_new_tokens", 0)
        if not 1 <= n <= _MOST_COMPLETIONS:
            raise PromptRefused("prompt.sampling.n", n, f"1 to {_MOST_COMPLETIONS}")
        room = self._max_model_len - max(wanted, 1)
        why = f": the model's context of {self._max_model_len} less max_new_tokens {max(wanted, 1)}"
        if 0 < spec.max_prompt_tokens < room:
            room, why = spec.max_prompt_tokens, ", the run's max_prompt_tokens"
        truncate = spec.long_prompts == broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT and room > 0
        token_ids = self._token_ids(prompt, spec.system_prompt, room, truncate)
        if token_ids.size > room:
            raise PromptRefused("prompt.input", f"{token_ids.size} tokens", f"at most {max(room, 0)}{why}")
        recorded = {}
        if purpose == experience_pb2.PURPOSE_TRAIN:
            recorded = {"masks": spec.sampling_masks, "routed_experts": spec.router_replay}
        max_new_tokens = wanted or self._max_model_len - token_ids.size
        return token_ids, GenerationRequest(n, SamplingSettings(**values, max_new_tokens=max_new_tokens, **recorded))

    def text(self, token_ids: np.ndarray) -> str:
        """Decode tokens, special tokens included, without cleaning up spaces."""
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return encodable(text)

    def _token_ids(self, prompt: experience_pb2.Prompt, system_prompt: str, room: int, truncate: bool) -> np.ndarray:
        """Return the prompt's tokens, int32 [P]; at most `room` with `truncate`."""
        form = prompt.WhichOneof("input")
        messages: list[Message] = []
        if form == "token_ids":
            token_ids = _given_ids(prompt.token_ids)
        elif form == "text":
            token_ids = self._encode(prompt.text, whole=truncate)
        elif form == "chat":
            messages = self._messages(prompt.chat, system_prompt)
            token_ids = self._encode(self._render(messages), whole=truncate)
        else:
            raise PromptRefused("prompt.input", "nothing", "exactly one of chat, text, token_ids")
        if not token_ids.size:
            raise PromptRefused(f"prompt.{form}", "no tokens", "at least one token")
        if not truncate or token_ids.size <= room:
            return token_ids
        SHORTENED.inc()
        if form == "chat":
            return self._truncate_chat(messages, room)
        begins = int(token_ids[0]) == getattr(self._tokenizer, "bos_token_id", None)
        return _cut(token_ids, int(begins), room, needed=int(begins) + 1)

    def _truncate_chat(self, messages: list[Message], room: int) -> np.ndarray:
        """Return the chat's tokens, int32, at most `room`. Raises PromptRefused if what must stay is longer."""
        turns = [at for at, message in enumerate(messages) if message["role"] != "system"]
        begins = [at for at in turns if messages[at]["role"] == messages[turns[0]]["role"]]

        def kept(begin: int) -> list[Message]:
            return [message for at, message in enumerate(messages) if at >= begin or message["role"] == "system"]

        def fits(begin: int) -> bool:
            return self._encode(self._render(kept(begin))).size <= room

        # By bisection: a chat may have 100,000 turns, and each try renders and tokenizes it.
        fitting = bisect_left(begins, True, key=fits)
        if fitting < len(begins):
            return self._encode(self._render(kept(begins[fitting])))
        left = kept(begins[-1]) if begins else messages
        text = self._render(left)
        token_ids, head = self._encode(text), self._encode(self._before_first_turn(left, text))
        same = int(np.argmin(np.append(head[: token_ids.size] == token_ids[: head.size], False)))
        generation_prompt = self._encode(text.removeprefix(self._render(left, generation_prompt=False))).size
        return _cut(token_ids, same, room, needed=same + min(generation_prompt, token_ids.size - same) + 1)

    def _before_first_turn(self, messages: list[Message], text: str) -> str:
        """Return the text before the content of the first turn: the common prefix with a rendering in which that turn
        has different content."""
        first = next((at for at, message in enumerate(messages) if message["role"] != "system"), None)
        if first is None:
            return ""
        other = "b" if messages[first]["content"].lstrip()[:1] == "a" else "a"
        changed = [{**message, "content": other} if at == first else message for at, message in enumerate(messages)]
        return os.path.commonprefix([text, self._render(changed)])

    def _encode(self, text: str, whole: bool = True) -> np.ndarray:
        """Return the text's tokens, int32.

        Unless `whole`, a text whose length shows that it cannot fit in the context is rejected without tokenizing it,
        which takes a second of CPU time per megabyte.
        """
        most = max(LONG_BYTES, self._max_model_len * self._longest_token)
        if len(text) > most and not whole:
            raise PromptRefused(
                "prompt.input",
                f"{len(text)} characters",
                f"at most {most}: the model's context of {self._max_model_len} tokens of at most "
                f"{self._longest_token} characters",
            )
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _messages(self, chat: experience_pb2.Chat, system_prompt: str) -> list[Message]:
        if not chat.messages:
            raise PromptRefused("prompt.chat.messages", "none", "at least one message")
        if getattr(self._tokenizer, "chat_template", "") is None:
            raise PromptRefused("prompt.chat", "a chat, and the model has no chat template", "text or token_ids")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        if system_prompt and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def _render(self, messages: list[Message], generation_prompt: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a chat template may raise anything
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PromptRefused(
                "prompt.chat",
                f"what the model's chat template refuses ({reason})",
                "a chat it can render, text or token_ids",
            ) from error


def _cut(token_ids: np.ndarray, head: int, room: int, needed: int) -> np.ndarray:
    """Keep the first `head` tokens and the last ones, `room` in all. Raises PromptRefused if `needed` exceed `room`."""
    if room < needed:
        raise PromptRefused(
            "prompt.input",
            f"{token_ids.size} tokens, of which {needed} at least must stay",
            f"at most {max(room, 0)}: there is no room for what may not be cut off",
        )
    return np.concatenate([token_ids[:head], token_ids[token_ids.size - (room - head) :]])


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
