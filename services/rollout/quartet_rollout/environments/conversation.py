"""A completion as it grows: turns as they were sampled, answers as they were appended. No token is ever changed."""

from dataclasses import dataclass

import numpy as np

from quartet_rollout.engines.base import EngineCompletion, FinishReason, SamplingMask


@dataclass(frozen=True)
class PlayedCompletion(EngineCompletion):
    """A completion of several turns: its fields are those of all of it, the answers between the turns included.

    Tokens of answers have log-prob 0 and belong to the version span of the token before them.
    """

    loss_mask: np.ndarray | None = None
    """uint8 [T]: 1 where the policy generated the token, 0 where it was inserted."""
    turns: int = 1
    """Turns of the policy."""
    last_turn: tuple[int, int] = (0, 0)
    """First token of the last turn, and one past its last."""


def inserted_tokens(completion: EngineCompletion) -> int:
    """Return how many of a completion's tokens were inserted."""
    mask = getattr(completion, "loss_mask", None)
    return 0 if mask is None else int(mask.size - mask.sum())


class Conversation:
    """A prompt and its completion so far."""

    def __init__(self, prompt_token_ids: np.ndarray):
        """`prompt_token_ids`: int32 [P]."""
        self._prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        self._tokens: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._loss_mask: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._candidates: list[np.ndarray] = []
        self._masked = False
        self._spans: list[tuple[int, int, int]] = []
        self._last_turn = (0, 0)
        self.size = 0
        """Tokens of the completion."""
        self.turns = 0
        """Turns of the policy."""

    @property
    def completion_token_ids(self) -> np.ndarray:
        """int32 [T]."""
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + T]: what the policy reads next."""
        return np.concatenate([self._prompt, *self._tokens])

    def add_turn(self, turn: EngineCompletion) -> None:
        """Take in what the policy generated."""
        begin = self.size
        for version, first, end in turn.version_spans:
            self._add_span(version, begin + first, begin + end)
        self._append(turn.token_ids, turn.log_probs, 1, turn.mask)
        self._last_turn = (begin, self.size)
        self.turns += 1

    def insert(self, token_ids: np.ndarray) -> None:
        """Append what the policy did not generate; after at least one token that it did."""
        if not token_ids.size:
            return
        self._append(token_ids, np.zeros(token_ids.size, np.float32), 0, None)
        version, first, _ = self._spans[-1]
        self._spans[-1] = (version, first, self.size)

    def completed(self, index: int, reason: FinishReason) -> PlayedCompletion:
        """Return the completion."""
        mask = SamplingMask(np.concatenate(self._counts), np.concatenate(self._candidates)) if self._masked else None
        return PlayedCompletion(
            index=index,
            token_ids=np.concatenate(self._tokens),
            log_probs=np.concatenate(self._log_probs),
            finish_reason=reason,
            version_spans=tuple(self._spans),
            mask=mask,
            loss_mask=np.concatenate(self._loss_mask),
            turns=self.turns,
            last_turn=self._last_turn,
        )

    def _append(self, token_ids: np.ndarray, log_probs: np.ndarray, mark: int, mask: SamplingMask | None) -> None:
        self._tokens.append(token_ids)
        self._log_probs.append(log_probs)
        self._loss_mask.append(np.full(token_ids.size, mark, np.uint8))
        self._counts.append(np.zeros(token_ids.size, np.int32) if mask is None else mask.counts)
        self._candidates.append(np.zeros(0, np.int32) if mask is None else mask.token_ids)
        self._masked = self._masked or mask is not None
        self.size += token_ids.size

    def _add_span(self, version: int, begin: int, end: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1], end)
        else:
            self._spans.append((version, begin, end))
