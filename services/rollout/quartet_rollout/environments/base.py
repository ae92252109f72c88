"""What an environment is: the one interface between the rollout and whatever answers the policy's turns.

A completion of several turns is what the policy generates, cut where its turns end, with the environment's answers
inserted between: tokens that the policy reads and that are in no loss. An environment sees texts and token ids and
knows nothing of engines, brokers or masks. All of it runs in the rollout's event loop: what is slow must be awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from quartet.v1 import experience_pb2


class Parameters(BaseModel):
    """Parameters of an environment; its own are a subclass. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentFailed(Exception):
    """The environment cannot answer, through no fault of the policy. Never a reward: the prompt is given back."""

    def __init__(self, message: str, permanent: bool = False, counted: bool = True):
        """`permanent`: no other attempt can help. `counted`: it counts against the prompt (max_deliveries)."""
        super().__init__(message)
        self.permanent, self.counted = permanent, counted


@dataclass(frozen=True)
class Start:
    """What is known before a completion's first turn."""

    prompt: experience_pb2.Prompt
    """As its author wrote it: its reference and metadata are here."""
    prompt_text: str
    """As the policy reads it, decoded."""
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    index: int
    """The completion's place in its group, from 0."""
    run_id: str
    """The run, for fair queueing."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy that ended by itself: at the end of sequence, a stop string or a stop token."""

    number: int
    """From 0."""
    text: str
    """What the policy wrote in this turn, without an end of sequence."""
    token_ids: np.ndarray
    """int32 [t]: this turn as sampled, the end of sequence included."""
    stop: str
    """The stop string that ended it; empty at the end of sequence or a stop token."""
    completion_text: str
    """All turns and answers so far, this turn included, special tokens included."""
    completion_token_ids: np.ndarray
    """int32 [T]: the same, as the policy will read it."""


@dataclass(frozen=True)
class Answer:
    """What is inserted after a turn; the policy then has its next. An empty text without a role lets it just go on."""

    text: str
    """Special tokens in it are taken as plain text: an answer cannot end the policy's turn."""
    role: str = ""
    """Role of a chat message, e.g. "tool" or "user": for chat prompts the text then is a message in the form of the
    model's chat template, followed by the head of the policy's next turn. Empty, and for prompts that are no chat: the
    text is inserted as it stands."""


class Episode(Protocol):
    """One completion's conversation with its environment; made by `Environment.begin`."""

    async def answer(self, turn: Turn) -> Answer | None:
        """Return what follows a turn, or None if the completion is complete.

        Raises EnvironmentFailed if that cannot be said; any other exception counts as a permanent one. Cancelled at the
        deadline, and whenever the group is given up.
        """

    async def close(self) -> None:
        """Free what the episode holds. Called once, however it ended."""


@dataclass(frozen=True)
class Execution:
    """How a program ended in the sandbox."""

    outcome: str
    """"exited", "signalled", "timed_out", "memory_exceeded" or "output_exceeded"."""
    exit_code: int
    """Of a program that exited; 0 is success."""
    stdout: str
    """What it printed, at most the bytes asked for."""
    stderr: str
    """Likewise."""
    elapsed: float
    """Seconds."""


class Tools(Protocol):
    """What environments may use of the rest of the system."""

    @property
    def away(self) -> bool:
        """Whether the reward service could not be reached when it was last called."""

    async def execute(
        self,
        source: str,
        *,
        stdin: str = "",
        timeout_seconds: float = 10.0,
        memory_bytes: int = 0,
        output_bytes: int = 0,
        run_id: str = "",
    ) -> Execution:
        """Run a Python program in the reward service's sandbox; the limits are those of the contract's Execute.

        Waits while the service is away or full. Raises EnvironmentFailed if it refuses.
        """


class Environment(Protocol):
    """An environment. One small file, registered by name (`registry`) or as an entry point."""

    name: str
    """In EnvironmentSpec.name."""
    description: str
    """What it does, in a sentence."""
    parameters: type[Parameters]
    """Its parameters' model."""

    def stop(self, parameters: Any) -> Sequence[str]:
        """Return stop strings that end a turn, besides those of the sampling."""

    def begin(self, start: Start, parameters: Any, tools: Tools) -> Episode:
        """Begin a completion. Quick; raises EnvironmentFailed if the prompt is not one for it."""
