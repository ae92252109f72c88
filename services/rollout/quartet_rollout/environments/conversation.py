"""A growing completion: sampled turns and inserted answers. Tokens are appended, and never changed.

Each answer is tokenized once; the conversation before it is not tokenized again. For a chat, the text that the model's
template puts between turns is found by rendering placeholders, once per role, so an answer costs one tokenizer call.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from quartet.v1 import experience_pb2

from quartet_common.log import get_logger
from quartet_common.text import encodable
from quartet_rollout.engines.base import EngineCompletion, FinishReason, SamplingMask, version_spans
from quartet_rollout.environments.base import Answer

log = get_logger(__name__)

LEAST_TURN_TOKENS = 8
"""An answer must leave the policy at least this many tokens; otherwise the completion ends as truncated."""

_TURN, _ANSWER = "quartet-turn-holder", "quartet-answer-holder"
_EMPTY = np.zeros(0, np.int32)


Frame = tuple[np.ndarray, np.ndarray]
"""The template's tokens before and after an answer, int32 each."""
_NO_FRAME = (_EMPTY, _EMPTY)


class AnswerWriter:
    """Tokenizes answers for one model."""

    def __init__(self, tokenizer: Any):
        """`tokenizer` is the model's transformers tokenizer."""
        self._tokenizer = tokenizer
        self._frames: dict[tuple[str, str], Frame] = {}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))

    def spoken(self, token_ids: np.ndarray) -> np.ndarray:
        """Return a turn without the special token that ends it."""
        return token_ids[:-1] if token_ids.size and int(token_ids[-1]) in self._special else token_ids

    def write(
        self, answer: Answer, chat: experience_pb2.Chat | None, last_token: int, room: int, most: int
    ) -> np.ndarray | None:
        """Return the tokens to append, int32, or None if they leave no room for another turn.

        Args:
            chat: the prompt, if it is a chat.
            last_token: the conversation's last token; if the template's frame begins with it, it is not repeated.
            room: tokens left for the completion.
            most: tokens of the answer itself; a marker replaces the middle of a longer one.
        """
        before, after = _NO_FRAME
        if chat is not None and answer.role:
            before, after = self._frame(answer.role, chat.template_arguments)
        if before.size and int(before[0]) == last_token:
            before = before[1:]
        room -= before.size + after.size + LEAST_TURN_TOKENS
        content = self._encode(encodable(answer.text), split_special_tokens=True)
        kept = self._shorten(content, min(room, most))
        return None if kept is None else np.concatenate([before, kept, after])

    def _shorten(self, content: np.ndarray, most: int) -> np.ndarray | None:
        if most < 0:
            return None
        if content.size <= most:
            return content
        for text in (f"\n[... {content.size - most} tokens or more left out ...]\n", "[...]"):
            mark = self._encode(text, split_special_tokens=True)
            if mark.size < most:
                head = (most - mark.size + 1) // 2
                tail = most - mark.size - head
                return np.concatenate([content[:head], mark, content[content.size - tail :]])
        return None

    def _frame(self, role: str, arguments: str) -> Frame:
        if (role, arguments) not in self._frames:
            self._frames[role, arguments] = self._render(role, json.loads(arguments or "{}"))
        return self._frames[role, arguments]

    def _render(self, role: str, arguments: dict[str, Any]) -> Frame:
        """Return the template's frame for `role`, else that for a user message, else an empty one."""
        if getattr(self._tokenizer, "chat_template", "") is None:
            return _NO_FRAME
        for named in dict.fromkeys((role, "user")):
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _TURN},
                {"role": named, "content": _ANSWER},
            ]
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **arguments
                )
            except Exception as error:  # a chat template may raise anything
                log.info("the chat template refuses the role '%s': %s", named, error)
                continue
            _, turn, rest = text.partition(_TURN)
            before, answer, after = rest.partition(_ANSWER)
            if turn and answer:
                return self._encode(before), self._encode(after)
        log.warning("the chat template shows no message of role '%s'; answers are inserted as they stand", role)
        return _NO_FRAME

    def _encode(self, text: str, **options: bool) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, **options), dtype=np.int32)


@dataclass(frozen=True)
class PlayedCompletion(EngineCompletion):
    """A completion of several turns. Its fields cover all tokens, those of the answers included.

    Tokens of answers have log-prob 0 and belong to the version span of the token before them.
    """

    loss_mask: np.ndarray | None = None
    """uint8 [T]: 1 where the policy generated the token, 0 where it was inserted."""
    turn_ends: tuple[int, ...] = ()
    """One past the last token of each turn of the policy."""
    last_turn: tuple[int, int] = (0, 0)
    """First token of the last turn, and one past its last."""
    turn_rewards: tuple[float | None, ...] = ()
    """By the rollout's own environment, for each turn; None for one without. Those of agents are by seat."""

    @property
    def has_turn_rewards(self) -> bool:
        """Whether any turn has a reward."""
        return any(reward is not None for reward in self.turn_rewards)

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return len(self.turn_ends)


def inserted_tokens(completion: EngineCompletion) -> int:
    """Return how many of a completion's tokens were inserted."""
    mask = getattr(completion, "loss_mask", None)
    return 0 if mask is None else int(mask.size - mask.sum())


class Conversation:
    """A prompt and its completion so far."""

    def __init__(self, prompt_token_ids: np.ndarray):
        """`prompt_token_ids`: int32 [P]."""
        self.prompt_token_ids = np.asarray(prompt_token_ids, dtype=np.int32)
        self._pieces: list[EngineCompletion] = []
        """Turns and answers, in order; answers have no version spans."""
        self._last_turn = (0, 0)
        self._turn_ends: list[int] = []
        self._turn_rewards: dict[int, float] = {}
        self.size = 0
        """Tokens of the completion."""

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return len(self._turn_ends)

    @property
    def completion_token_ids(self) -> np.ndarray:
        """int32 [T]."""
        return self.token_ids[self.prompt_token_ids.size :]

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + T]: prompt and completion, the policy's next input."""
        return np.concatenate([self.prompt_token_ids, *(piece.token_ids for piece in self._pieces)])

    def add_turn(self, turn: EngineCompletion) -> None:
        """Append a turn of the policy."""
        self._last_turn = (self.size, self.size + turn.token_ids.size)
        self._append(turn)
        self._turn_ends.append(self.size)

    def reward_turn(self, reward: float) -> None:
        """Note the reward of the last turn."""
        self._turn_rewards[self.turns - 1] = reward

    def insert(self, token_ids: np.ndarray) -> None:
        """Append an answer. At least one token of the policy must come before it."""
        self._append(EngineCompletion(0, token_ids, np.zeros(token_ids.size, np.float32), "stop", version_spans=()))

    def _append(self, piece: EngineCompletion) -> None:
        self._pieces.append(piece)
        self.size += piece.token_ids.size

    def completed(self, index: int, reason: FinishReason) -> PlayedCompletion:
        """Return the completion, after its last turn."""
        sizes = [piece.token_ids.size for piece in self._pieces]
        versions = [
            (version, begin + first)
            for piece, begin in zip(self._pieces, np.cumsum([0, *sizes]).tolist(), strict=False)
            for version, first, _ in piece.version_spans
        ]
        marks = [1 if piece.version_spans else 0 for piece in self._pieces]
        masks = [piece.mask or SamplingMask.nothing_cut(piece.token_ids.size) for piece in self._pieces]
        counts, candidates = [mask.counts for mask in masks], [mask.token_ids for mask in masks]
        masked = any(piece.mask is not None for piece in self._pieces)
        return PlayedCompletion(
            index=index,
            token_ids=self.completion_token_ids,
            log_probs=np.concatenate([piece.log_probs for piece in self._pieces]),
            finish_reason=reason,
            version_spans=version_spans(versions, self.size),
            mask=SamplingMask(np.concatenate(counts), np.concatenate(candidates)) if masked else None,
            routed_experts=self._pieces[-1].routed_experts,
            loss_mask=np.repeat(np.asarray(marks, np.uint8), sizes),
            turn_ends=tuple(self._turn_ends),
            last_turn=self._last_turn,
            turn_rewards=tuple(map(self._turn_rewards.get, range(self.turns))),
        )
