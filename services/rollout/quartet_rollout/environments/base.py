"""The interface between the rollout and an environment, which answers the policy's turns.

A completion of several turns consists of the policy's turns with the environment's answers between them. The policy
reads the answers' tokens, but they are not in the loss. An environment gets and returns text and token ids; engines,
broker and masks are hidden from it. It runs in the rollout's event loop, so it must not block.
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
    """Base class of an environment's parameters. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentFailed(Exception):
    """The environment cannot answer, through no fault of the policy. The prompt is released, without a reward."""

    def __init__(self, message: str, permanent: bool = False, counted: bool = True):
        """`permanent`: another attempt would fail too. `counted`: it counts against the prompt (max_deliveries)."""
        super().__init__(message)
        self.permanent, self.counted = permanent, counted


@dataclass(frozen=True)
class Start:
    """Input of `Environment.begin`."""

    prompt: experience_pb2.Prompt
    """The submitted prompt, with its reference and metadata."""
    prompt_text: str
    """The prompt's tokens, decoded."""
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    index: int
    """The completion's index in its group, from 0."""
    run_id: str
    """The run, for fair queueing."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy that ended at an end of sequence, a stop string or a stop token."""

    number: int
    """From 0."""
    text: str
    """The text of this turn, without an end of sequence."""
    token_ids: np.ndarray
    """int32 [t]: this turn as sampled, the end of sequence included."""
    stop: str
    """The stop string that ended it; empty at the end of sequence or a stop token."""
    completion_text: str
    """All turns and answers so far, this turn included, special tokens included."""
    completion_token_ids: np.ndarray
    """int32 [T]: the tokens of `completion_text`."""


@dataclass(frozen=True)
class Answer:
    """Text inserted after a turn, before the policy's next turn. With an empty text and role the policy continues."""

    text: str = ""
    """Special tokens in it are tokenized as plain text, so an answer cannot end the policy's turn."""
    role: str = ""
    """Role of a chat message, e.g. "tool" or "user". For chat prompts the model's chat template then renders the text
    as a message, followed by the header of the policy's next turn. If empty, or for other prompts, the text is inserted
    unchanged."""
    reward: float | None = None
    """Reward of the turn, added to those of the verifiers; None for a turn without one."""
    ends: bool = False
    """Whether the completion ends with the turn; nothing is inserted then."""


class Episode(Protocol):
    """One completion's conversation with its environment; created by `Environment.begin`."""

    async def answer(self, turn: Turn) -> Answer | None:
        """Return the answer to a turn, or None to end the completion without a reward for the turn.

        Raises EnvironmentFailed if it cannot answer; any other exception is treated as a permanent failure. Cancelled
        at the deadline, and when the group is cancelled.
        """

    async def close(self) -> None:
        """Free the episode's resources. Called once, however the episode ended."""


@dataclass(frozen=True)
class Execution:
    """How a program ended in the sandbox."""

    outcome: str
    """"exited", "signalled", "timed_out", "memory_exceeded" or "output_exceeded"."""
    exit_code: int
    """Of a program that exited; 0 is success."""
    stdout: str
    """At most the requested number of bytes; `stderr` too."""
    stderr: str
    elapsed: float
    """Seconds."""


class Tools(Protocol):
    """Services for environments."""

    @property
    def away(self) -> bool:
        """Whether the last call could not reach the reward service."""

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
        """Run a Python program in the reward service's sandbox, with the limits of the contract's Execute.

        Retries while the service is unreachable or full. Raises EnvironmentFailed if it rejects the program.
        """


class Environment(Protocol):
    """An environment, registered by name (`registry`) or as an entry point."""

    name: str
    """Value of EnvironmentSpec.name."""
    description: str
    """What it does, in a sentence."""
    parameters: type[Parameters]
    """Model of its parameters."""

    def stop(self, parameters: Any) -> Sequence[str]:
        """Return stop strings that end a turn, in addition to those of the sampling parameters."""

    def begin(self, start: Start, parameters: Any, tools: Tools) -> Episode:
        """Begin a completion, without blocking. Raises EnvironmentFailed if it cannot use the prompt."""
