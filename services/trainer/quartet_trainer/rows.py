"""Supervised rows: chats, prompts with completions, texts and token ids become token ids and a mask of the loss.

A chat is rendered by the model's own chat template. Where that marks what the assistant says by `{% generation %}`, the
marked tokens are in the loss. Otherwise a turn of the assistant is what follows the rendering of the turns before it
with the generation prompt, up to its end token; both renderings must be prefixes of the whole chat's, token by token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from quartet.v1 import experience_pb2, tensor_pb2

from quartet_common.chats import MEDIA, ROLES, from_json, turns_of
from quartet_common.config import RunSection
from quartet_common.log import get_logger
from quartet_common.sft import ROW_FORMS, SftSection
from quartet_common.tensors import encode, encode_ragged
from quartet_common.values import json_object
from quartet_trainer.errors import LearnerError

log = get_logger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Row:
    """A row as a model reads it."""

    token_ids: np.ndarray
    """int32 [n], n >= 2."""
    in_loss: np.ndarray
    """bool [n]: tokens in the loss; never the first, which nothing predicts, and at least one."""

    def as_group(self) -> experience_pb2.GroupTensors:
        """Return it as a group of one completion, which begins with the first token in the loss."""
        first, end = int(self.in_loss.argmax()), self.in_loss.size - int(self.in_loss[::-1].argmax())
        tokens, zero = self.token_ids[first:end], np.zeros(1, dtype=np.float32)
        mask = self.in_loss[first:end].astype(np.uint8)
        return experience_pb2.GroupTensors(
            prompt_token_ids=encode(self.token_ids[:first]),
            completion_token_ids=encode_ragged([tokens], tensor_pb2.DTYPE_INT32),
            loss_mask=encode_ragged([mask], tensor_pb2.DTYPE_UINT8),
            rollout_log_probs=encode_ragged([np.zeros(tokens.size, dtype=np.float32)], tensor_pb2.DTYPE_FLOAT32),
            version_spans=encode_ragged([np.array([0, 0, tokens.size])], tensor_pb2.DTYPE_INT64),
            rewards=encode(zero),
            format_acc=encode(zero),
            ans_acc=encode(zero),
            ans_judged=encode(np.zeros(1, dtype=np.uint8)),
            temperatures=encode(zero + 1),
            truncated=encode(np.zeros(1, dtype=np.uint8)),
        )


def rows_of_step(step: int, per_step: int, count: int, seed: int, shuffle: bool = True) -> Iterator[int]:
    """Yield the places of a step's rows among `count`: pass after pass, each shuffled by `seed` and its own number."""
    numbers = range(step * per_step, (step + 1) * per_step)
    for passed, of_pass in itertools.groupby(numbers, lambda number: number // count):
        order = _order(seed, passed, count) if shuffle else range(count)
        yield from (int(order[number % count]) for number in of_pass)


@lru_cache(maxsize=4)
def _order(seed: int, passed: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, passed]).permutation(count)


class RowReader:
    """Reads rows for one model."""

    def __init__(
        self,
        folder: Path,
        vocabulary_size: int,
        longest: int | None,
        run: RunSection,
        section: SftSection | None = None,
    ):
        """Read nothing yet; the tokenizer is loaded for the first row that is no token ids.

        Args:
            folder: the model's.
            vocabulary_size: ids must be below it.
            longest: most tokens of a row; None: any number.
            run: chats and texts are read as its prompts are (system_prompt, add_special_tokens).
            section: what happens to longer rows, the turns in the loss, the end token. None: its defaults.
        """
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self._longest = longest
        self._run = run
        self._section = section or SftSection()

    def read(self, file: Path, key: str) -> list[Row]:
        """Return the rows of a JSONL file in its order, without those that are left out.

        Args:
            key: of the run file, for errors.

        Raises:
            LearnerError: the file cannot be read, has no row, or a row is refused, which the message names.
        """
        rows: list[Row] = []
        dropped: list[int] = []
        cut: list[int] = []
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise LearnerError(f"{key}: {file} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                form, row = self._row(line)
                size = row.token_ids.size
                if self._longest is not None and size > self._longest:
                    if self._section.long_rows == "refuse":
                        raise ValueError(f"{form} has {size} tokens; the model reads at most {self._longest}")
                    if self._section.long_rows == "truncate":
                        row = Row(row.token_ids[: self._longest], row.in_loss[: self._longest])
                    gone = self._section.long_rows == "drop" or not row.in_loss.any()
                    (dropped if gone else cut).append(number)
                    if gone:
                        continue
                if not row.in_loss.any():
                    raise ValueError(f"{form} has no token in the loss; leave the row out")
            except ValueError as error:
                raise LearnerError(f"{key}: {file}, line {number}: {error}") from error
            rows.append(row)
        for what, numbers in (("left out", dropped), ("cut at their end", cut)):
            if numbers:
                log.warning(
                    f"{key}: {len(numbers)} rows of more than {self._longest} tokens are {what}, the first in line "
                    f"{numbers[0]} (long_rows = '{self._section.long_rows}')"
                )
        if not rows:
            raise LearnerError(f"{key}: {file} has no {'row that is short enough' if dropped else 'line'}")
        return rows

    def _row(self, line: str) -> tuple[str, Row]:
        """Return a line's form and its row. Raises ValueError."""
        try:
            given = json.loads(line, object_pairs_hook=json_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"got {line[:60]!r}; a row is a JSON object")
        fields = {name: value for name, value in given.items() if value is not None}
        if media := next((name for name, value in fields.items() if name in MEDIA and value), ""):
            raise ValueError(
                f'got "{media}", which the model would not see; allowed: text; leave the column out (fields)'
            )
        forms = [form for form in ROW_FORMS if form in fields]
        if len(forms) != 1:
            came = " and ".join(forms) if forms else f"only {', '.join(fields) or 'nothing'}"
            raise ValueError(
                f"a row has one of messages, prompt with completion, text and input_ids; got {came}; name the columns "
                "by the source's fields"
            )
        readers = {"messages": self._chat, "completion": self._completion, "text": self._text, "input_ids": self._ids}
        ids, in_loss = readers[forms[0]](fields)
        row = Row(np.array(ids, dtype=np.int32), np.array(in_loss, dtype=bool))
        if row.token_ids.size < 2:
            raise ValueError(f"{forms[0]} has {row.token_ids.size} tokens; a row has at least two")
        if row.token_ids.min() < 0 or row.token_ids.max() >= self._vocabulary_size:
            allowed = f"this model's are 0 to {self._vocabulary_size - 1}"
            raise ValueError(f"{forms[0]} has ids from {row.token_ids.min()} to {row.token_ids.max()}; {allowed}")
        row.in_loss[0] = False
        return forms[0], row

    def _ids(self, fields: dict[str, Any]) -> tuple[list[int], list[bool]]:
        ids, labels = fields["input_ids"], fields.get("labels", fields["input_ids"])
        for name, value in (("input_ids", ids), ("labels", labels)):
            if not isinstance(value, list) or not all(type(token) is int and abs(token) < 2**31 for token in value):
                raise ValueError(f"{name} must be a list of whole numbers")
        if len(labels) != len(ids) or any(label not in (-100, token) for token, label in zip(ids, labels, strict=True)):
            raise ValueError("labels must be input_ids with -100 in the place of tokens outside the loss")
        return ids, [label != -100 for label in labels]

    def _text(self, fields: dict[str, Any]) -> tuple[list[int], list[bool]]:
        ids = self._encode("text", fields["text"], self._run.add_special_tokens) + self._end
        return ids, [True] * len(ids)

    def _completion(self, fields: dict[str, Any]) -> tuple[list[int], list[bool]]:
        if "prompt" not in fields:
            raise ValueError("completion without prompt; a text that is in the loss as a whole is under text")
        if fields["completion"] == "":
            raise ValueError("completion is empty; leave the row out")
        prompt = self._encode("prompt", fields["prompt"], self._run.add_special_tokens)
        completion = self._encode("completion", fields["completion"], False) + self._end
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def _encode(self, field: str, text: Any, special: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"{field} must be text, got {str(text)[:60]!r}; a chat is under messages")
        return self._tokenizer.encode(text, add_special_tokens=special)

    @property
    def _end(self) -> list[int]:
        if not self._section.append_eos:
            return []
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in '{self._folder}' has no end token; set sft.append_eos = false")
        return [self._tokenizer.eos_token_id]

    def _chat(self, fields: dict[str, Any]) -> tuple[list[int], list[bool]]:
        given = fields["messages"]
        for at, turn in enumerate(given if isinstance(given, list) else ()):
            needed = ("role",) if isinstance(turn, dict) and turn.get("tool_calls") else ("role", "content")
            if isinstance(turn, dict) and (missing := [key for key in needed if turn.get(key) is None]):
                raise ValueError(
                    f"messages[{at}] has no {' and no '.join(missing)}, but {', '.join(turn) or 'nothing'}; give "
                    "role and content"
                )
        try:
            messages = [{key: part for key, part in turn.items() if part is not None} for turn in turns_of(given)]
            tools, arguments = from_json(fields.get("tools")), from_json(fields.get("chat_template_kwargs", {}))
        except (AttributeError, TypeError) as error:
            raise ValueError(f"messages must be a list of {{role, content}}: {error}") from error
        if not isinstance(arguments, dict):
            raise ValueError(f"chat_template_kwargs must be an object, got {str(arguments)[:60]!r}")
        for turn in messages:
            if turn.get("role") not in ROLES:
                raise ValueError(f"messages has the role {turn.get('role')!r}; allowed: {', '.join(ROLES)}")
            if turn["role"] == "assistant" and not (turn["content"] or turn.get("tool_calls")):
                raise ValueError("messages has an empty turn of the assistant; leave the row out")
        if self._run.system_prompt and not any(turn["role"] in ("system", "developer") for turn in messages):
            messages.insert(0, {"role": "system", "content": self._run.system_prompt})
        turns = [at for at, turn in enumerate(messages) if turn["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise ValueError("messages needs a turn of the assistant, after another's")
        last = self._section.assistant_turns == "last"
        template = {"tools": tools or None, **arguments}
        try:
            marked_by_template = _GENERATION.search(self._tokenizer.get_chat_template(tools=tools or None))
        except ValueError as error:
            raise ValueError(
                f"messages: the model in '{self._folder}' has no chat template; set model.chat_template, or give "
                "prompt and completion"
            ) from error
        if marked_by_template:
            whole = self._render(messages, return_assistant_tokens_mask=True, **template)
            marked = np.array(whole["assistant_masks"], dtype=bool)
            if last:  # only the last run of marked tokens
                marked[: int(np.flatnonzero(np.diff(marked, prepend=False) & marked)[-1:].sum())] = False
            return whole["input_ids"], marked.tolist()
        ids = self._render(messages, **template)["input_ids"]
        in_loss = [False] * len(ids)
        for at in turns[-1:] if last else turns:
            before = self._render(messages[:at], add_generation_prompt=True, **template)["input_ids"]
            through = self._render(messages[: at + 1], **template)["input_ids"]
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise ValueError(
                    f"messages[{at}]: the model's chat template renders the assistant's turn in another way when it is "
                    "asked for or when turns follow it, so that its tokens cannot be told; allowed: a template with "
                    "{% generation %} (model.chat_template), or sft.assistant_turns = 'last' if earlier turns change"
                )
            ends = [place for place in range(len(before), len(through)) if ids[place] in self._end_ids]
            stop = ends[-1] + 1 if ends else len(through)
            in_loss[len(before) : stop] = [True] * (stop - len(before))
        return ids, in_loss

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # a chat template may raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"messages: the model's chat template refuses them: {reason}") from error

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # of transformers, tokenizers or a file of theirs
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the tokenizer in '{self._folder}' cannot be loaded: {reason}") from error

    @cached_property
    def _end_ids(self) -> set[int]:
        """The tokens at which a completion ends."""
        try:
            listed = json.loads((self._folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError):
            listed = None
        return {*(listed if isinstance(listed, list) else [listed]), self._tokenizer.eos_token_id} - {None}
