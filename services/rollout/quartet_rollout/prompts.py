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
from dataclasses import replace
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, tensor_pb2

from quartet_common.tensors import decode
from quartet_common.text import encodable
from quartet_rollout.chats import INSTRUCTIONS, Chat, ChatRenderer
from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.generation import GenerationRequest, PromptRefused, sampling_values
from quartet_rollout.metrics import SHORTENED

LONG_BYTES = 1 << 16
"""A longer prompt is read in a thread, not in the event loop."""

_MOST_COMPLETIONS = 1024


def room_for_prompt(max_new_tokens: int, spec: broker_pb2.RunSpec, max_model_len: int) -> tuple[int, str]:
    """Return how many tokens a prompt may have, and why.

    Args:
        max_new_tokens: of its completions; 0: as many as are left.

    Raises:
        PromptRefused: the completion alone has no room.
    """
    completion = max(max_new_tokens, 1)
    if completion >= max_model_len:
        raise PromptRefused("sampling.max_new_tokens", completion, f"below {max_model_len}, the model's context")
    room = max_model_len - completion
    if 0 < spec.max_prompt_tokens < room:
        return spec.max_prompt_tokens, "the run's max_prompt_tokens"
    return room, f"the model's context of {max_model_len} less max_new_tokens {completion}"


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, tokenizer: Any, max_model_len: int):
        """`tokenizer` is the model's transformers tokenizer, `max_model_len` its context in tokens.

        The tokenizer must not be shared: this calls it from two threads, and options of a call stay set in it.
        """
        self._tokenizer = tokenizer
        self._chats = ChatRenderer(tokenizer)
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
        request = self.request(prompt, spec, purpose)
        wanted = sampling_values(prompt, spec, purpose).get("max_new_tokens", 0)
        room, why = room_for_prompt(wanted, spec, self._max_model_len)
        truncate = spec.long_prompts == broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT
        token_ids = self._token_ids(prompt, spec, room, truncate)
        if token_ids.size > room:
            raise PromptRefused("prompt.input", f"{token_ids.size} tokens", f"at most {room}: {why}")
        if not wanted:
            rest = {"max_new_tokens": self._max_model_len - token_ids.size}
            request = replace(request, settings=request.settings.model_copy(update=rest))
        return token_ids, request

    def request(self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec, purpose: int) -> GenerationRequest:
        """Return the request for a prompt's completions, whose length is bounded by the context if by nothing else.

        Raises PromptRefused, PromptError: its sampling is out of range.
        """
        values = sampling_values(prompt, spec, purpose)
        n = values.pop("n")
        if not 1 <= n <= _MOST_COMPLETIONS:
            raise PromptRefused("prompt.sampling.n", n, f"1 to {_MOST_COMPLETIONS}")
        recorded = {}
        if purpose == experience_pb2.PURPOSE_TRAIN:
            recorded = {"masks": spec.sampling_masks, "routed_experts": spec.router_replay}
        values["max_new_tokens"] = values.get("max_new_tokens") or self._max_model_len
        return GenerationRequest(n, SamplingSettings(**values, **recorded))

    def text(self, token_ids: np.ndarray) -> str:
        """Decode tokens, special tokens included, without cleaning up spaces."""
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return encodable(text)

    def _token_ids(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec, room: int, truncate: bool
    ) -> np.ndarray:
        """Return the prompt's tokens, int32 [P]; at most `room` with `truncate`."""
        form = prompt.WhichOneof("input")
        chat: Chat | None = None
        if form == "token_ids":
            token_ids = _given_ids(prompt.token_ids)
        elif form == "text":
            token_ids = self._encode(prompt.text, whole=truncate, special=spec.add_special_tokens)
        elif form == "chat":
            chat = self._chats.read(prompt.chat, spec.system_prompt)
            token_ids = self._encode(self._chats.render(chat), whole=truncate)
        elif form == "task":
            raise PromptRefused("prompt.task", "a task", "a task with a served environment: environment.served")
        else:
            raise PromptRefused("prompt.input", "nothing", "exactly one of chat, text, token_ids, task")
        if not token_ids.size:
            raise PromptRefused(f"prompt.{form}", "no tokens", "at least one token")
        if not truncate or token_ids.size <= room:
            return token_ids
        SHORTENED.inc()
        if chat is not None:
            return self._truncate_chat(chat, room)
        begins = int(token_ids[0]) == getattr(self._tokenizer, "bos_token_id", None)
        return _cut(token_ids, int(begins), room, needed=int(begins) + 1)

    def _truncate_chat(self, chat: Chat, room: int) -> np.ndarray:
        """Return the chat's tokens, int32, at most `room`. Raises PromptRefused if what must stay is longer."""
        messages = chat.messages
        turns = [at for at, message in enumerate(messages) if message["role"] not in INSTRUCTIONS]
        begins = [at for at in turns if messages[at]["role"] == messages[turns[0]]["role"]]

        def kept(begin: int) -> Chat:
            rest = [one for at, one in enumerate(messages) if at >= begin or one["role"] in INSTRUCTIONS]
            return replace(chat, messages=rest)

        def fits(begin: int) -> bool:
            return self._encode(self._chats.render(kept(begin))).size <= room

        # By bisection: a chat may have 100,000 turns, and each try renders and tokenizes it.
        fitting = bisect_left(begins, True, key=fits)
        if fitting < len(begins):
            return self._encode(self._chats.render(kept(begins[fitting])))
        left = kept(begins[-1]) if begins else chat
        text = self._chats.render(left)
        token_ids, head = self._encode(text), self._encode(self._before_first_turn(left, text))
        same = int(np.argmin(np.append(head[: token_ids.size] == token_ids[: head.size], False)))
        end = "" if chat.continued else text.removeprefix(self._chats.render(left, generation_prompt=False))
        generation_prompt = self._encode(end).size
        return _cut(token_ids, same, room, needed=same + min(generation_prompt, token_ids.size - same) + 1)

    def _before_first_turn(self, chat: Chat, text: str) -> str:
        """Return the text before the content of the first turn: the common prefix with a rendering in which that turn
        has different content."""
        messages = chat.messages
        first = next((at for at, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), None)
        if first is None:
            return ""
        other = "b" if messages[first]["content"].lstrip()[:1] == "a" else "a"
        changed = [{**message, "content": other} if at == first else message for at, message in enumerate(messages)]
        return os.path.commonprefix([text, self._chats.render(replace(chat, messages=changed))])

    def _encode(self, text: str, whole: bool = True, special: bool = False) -> np.ndarray:
        """Return the text's tokens, int32, with `special` those that the tokenizer adds.

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
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=special), dtype=np.int32)


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
