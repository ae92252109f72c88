"""A Prompt as the token ids that the model sees. What follows is tokens in, tokens out: nothing is tokenized twice.

Prompts that are too long are truncated at their beginning. What a chat needs to be answered at all stays: its system
message, with whatever the chat template puts before the first turn, and the generation prompt at its end. Its oldest
turns go first, whole; only when the last one alone is too long is the beginning of that one cut off, behind its header.
Text and token ids lose their first tokens, but never a beginning-of-sequence token.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, tensor_pb2

from quartet_common.tensors import decode
from quartet_common.text import encodable
from quartet_rollout.generation import (
    GenerationRequest,
    PromptRefused,
    completions_per_prompt,
    new_tokens_wanted,
    sampling_layers,
    settings_of,
)
from quartet_rollout.metrics import SHORTENED

LONG_BYTES = 1 << 16
"""A longer prompt is not read in the event loop's thread."""


class Texts:
    """A transformers tokenizer's, at the cost of the tokenizer itself.

    transformers prepares every single text for what is not wanted here (pairs, padding, truncation, tensors), at ten
    times the cost of a short one. So the tokenizer beneath is asked, where the class leaves all of the work to it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer whose settings nobody changes from now on."""
        self._tokenizer = tokenizer
        self._beneath = _beneath(tokenizer)
        if self._beneath is not None:
            self._beneath.no_truncation()
            self._beneath.no_padding()
            self._beneath.encode_special_tokens = tokenizer.split_special_tokens
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """In characters."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32."""
        if self._beneath is None:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        if len(text) <= LONG_BYTES:
            return np.asarray(self._beneath.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        # Only with a batch the tokenizer lets other threads run meanwhile: megabytes take it seconds.
        (encoded,) = self._beneath.encode_batch([text], add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self._beneath is None:
            return encodable(
                self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        return self._beneath.decode(token_ids, skip_special_tokens=False)


def _beneath(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that does all the work; None where the class, or one it inherits from, has a part in
    it."""
    try:
        from transformers import TokenizersBackend
    except ImportError:  # transformers 4
        return None
    methods = ("encode", "_encode_plus", "decode", "_decode")
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    plain = all(getattr(type(tokenizer), name) is getattr(TokenizersBackend, name) for name in methods)
    return tokenizer.backend_tokenizer if plain else None


Message = dict[str, str]


def truncate_tokens(token_ids: np.ndarray, room: int, bos_token_id: int | None) -> np.ndarray:
    """Return the last `room` tokens, int32; the first of them is the beginning of sequence if it was there."""
    if token_ids.size <= room:
        return token_ids
    head = token_ids[:1] if bos_token_id is not None and int(token_ids[0]) == bos_token_id else token_ids[:0]
    return _cut(token_ids, head.size, room, needed=head.size + 1)


def truncate_chat(
    messages: list[Message],
    room: int,
    render: Callable[[list[Message], bool], str],
    encode: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Return the tokens of the chat, int32, at most `room`.

    Args:
        messages: the chat, its system message (if any) among them.
        render: the chat template; its second argument asks for the generation prompt. Raises PromptRefused.
        encode: the tokenizer.

    Raises:
        PromptRefused: the template refuses the chat, or there is no room for what must stay.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] != "system"]
    kept, text = messages, render(messages, True)
    token_ids = encode(text)
    if token_ids.size <= room:
        return token_ids
    # The fewest turns to drop, by bisection: a chat may have 100,000 turns, and each try costs all of it.
    fitting, first, end = None, 1, len(turns)
    while first < end:
        middle = (first + end) // 2
        for dropped in range(middle, end):
            gone = set(turns[:dropped])
            shorter = [message for at, message in enumerate(messages) if at not in gone]
            try:
                rendered = render(shorter, True)
            except PromptRefused:
                continue  # e.g. a template that wants the user to begin
            shortened = encode(rendered)
            if shortened.size <= room:
                fitting, end = shortened, middle
            else:
                kept, text, token_ids, first = shorter, rendered, shortened, dropped + 1
            break
        else:
            end = middle
    if fitting is not None:
        return fitting
    head = encode(_before_first_turn(kept, text, render))
    same = int(np.argmin(np.append(head[: token_ids.size] == token_ids[: head.size], False)))
    generation_prompt = encode(text.removeprefix(render(kept, False))).size
    return _cut(token_ids, same, room, needed=same + min(generation_prompt, token_ids.size - same) + 1)


def _before_first_turn(messages: list[Message], text: str, render: Callable[[list[Message], bool], str]) -> str:
    """What the template puts before the content of the first turn: found by giving that turn another content."""
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), None)
    if first is None:
        return ""
    other = "b" if messages[first]["content"].lstrip()[:1] == "a" else "a"
    changed = [{**message, "content": other} if at == first else message for at, message in enumerate(messages)]
    return os.path.commonprefix([text, render(changed, True)])


def _cut(token_ids: np.ndarray, head: int, room: int, needed: int) -> np.ndarray:
    """Leave out what follows the first `head` tokens until `room` are left."""
    if room < needed:
        raise PromptRefused(
            "prompt.input",
            f"{token_ids.size} tokens, of which {needed} at least must stay",
            f"at most {max(room, 0)}: there is no room for what may not be cut off",
        )
    return np.concatenate([token_ids[:head], token_ids[token_ids.size - (room - head) :]])


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
    ) -> tuple[np.ndarray, GenerationRequest]:
        """As `read`; a long prompt is read in a thread, one at a time, while the event loop goes on."""
        if prompt.ByteSize() <= LONG_BYTES:
            return self.read(prompt, spec, purpose)
        return await asyncio.get_running_loop().run_in_executor(self._long, self.read, prompt, spec, purpose)

    def read(
        self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
    ) -> tuple[np.ndarray, GenerationRequest]:
        """Return the prompt's tokens, int32 [P], and what is to be generated.

        Raises:
            PromptRefused, PromptError: the prompt is empty, too long, malformed, or its sampling is out of range.
        """
        spec = spec if spec is not None else broker_pb2.RunSpec()
        layers = sampling_layers(prompt, spec, purpose)
        n = completions_per_prompt(prompt, spec, purpose)
        wanted = new_tokens_wanted(layers)
        shorten = spec.long_prompts == broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT
        token_ids = self.token_ids(prompt, spec.system_prompt, whole=shorten)
        if shorten:
            token_ids = self._shorten(prompt, token_ids, spec, wanted)
        max_new_tokens = self._fit(token_ids.size, wanted, spec.max_prompt_tokens)
        recorded = {}
        if purpose == experience_pb2.PURPOSE_TRAIN:
            recorded = {"masks": spec.sampling_masks, "routed_experts": spec.router_replay}
        return token_ids, GenerationRequest(n, settings_of(layers, max_new_tokens, **recorded))

    def token_ids(self, prompt: experience_pb2.Prompt, system_prompt: str, whole: bool = False) -> np.ndarray:
        """Return the prompt's tokens, int32 [P], whatever their number but none.

        Unless it is wanted `whole`, a long text that cannot fit in the context is refused by its length alone: a
        tokenizer takes a second of processor time for each megabyte.
        """
        form = prompt.WhichOneof("input")
        if form == "token_ids":
            token_ids = _given_ids(prompt.token_ids)
        elif form == "text":
            token_ids = self._encode(prompt.text, whole)
        elif form == "chat":
            token_ids = self._encode(self._render(self._messages(prompt.chat, system_prompt)), whole)
        else:
            raise PromptRefused("prompt.input", "nothing", "exactly one of chat, text, token_ids")
        if not token_ids.size:
            raise PromptRefused(f"prompt.{form}", "no tokens", "at least one token")
        return token_ids

    def text(self, token_ids: np.ndarray) -> str:
        """Return the text of tokens, special tokens included, exactly as they stand."""
        return self._texts.decode(token_ids.tolist())

    def _encode(self, text: str, whole: bool) -> np.ndarray:
        most = max(LONG_BYTES, self._max_model_len * self._texts.longest_token)
        if len(text) > most and not whole:
            raise PromptRefused(
                "prompt.input",
                f"{len(text)} characters",
                f"at most {most}: the model's context of {self._max_model_len} tokens of at most "
                f"{self._texts.longest_token} characters",
            )
        return self._texts.encode(text)

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
            return truncate_chat(messages, room, self._render, self._texts.encode)
        return truncate_tokens(token_ids, room, getattr(self._tokenizer, "bos_token_id", None))

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
