"""The interface of a verifier.

A verifier that waits for nothing runs in place and never queues. One that waits, for a worker or a service, awaits
`begun.admitted()` first: the service goes on with it when there is room in its queue. The calls of `Tools` do so.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import (
    SPECIAL_TOKENS,
    THOUGHT_MARKERS,
    ThoughtMarkers,
    after_thinking,
    without_trailing_special_tokens,
)
from quartet_reward.math.equality import MathEquality
from quartet_reward.reward_model import RewardModel
from quartet_reward.sandbox.pool import Sandbox

LARGEST_NUMBER = 1e18
"""Bound of weights and float parameters: sums of hundreds of products of two stay finite in float32."""
NUMBER_ALLOWED = f"a finite number, at most {LARGEST_NUMBER:g} in size"


class Parameters(BaseModel):
    """Base of a verifier's parameters. Refuses unknown keys, and floats not finite or above `LARGEST_NUMBER`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*")
    @classmethod
    def _within_bounds(cls, value: Any) -> Any:
        if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(NUMBER_ALLOWED)
        return value


SpecialTokens = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64)]
"""Tokens that may stand at the end of a completion."""


Marker = Annotated[str, Field(min_length=1, max_length=64)]


class CompletionParameters(Parameters):
    """Base of the parameters of verifiers that read the completion's text."""

    special_tokens: SpecialTokens = Field(
        list(SPECIAL_TOKENS), description="Tokens that are dropped from the completion's end."
    )
    thought_markers: Annotated[list[tuple[Marker, Marker]], Field(max_length=16)] = Field(
        [], description="Pairs of texts that open and close a thought, beside <think> and the like."
    )

    @cached_property
    def markers(self) -> ThoughtMarkers:
        """The texts that open and close a thought."""
        return (*THOUGHT_MARKERS, *self.thought_markers)

    def completion_of(self, item: reward_pb2.ScoreItem) -> str:
        """Return an item's completion without special tokens at its end."""
        return without_trailing_special_tokens(item.completion, self.special_tokens)

    def outside_thoughts(self, item: reward_pb2.ScoreItem) -> str:
        """Return what an item's completion says after its thought, which its prompt may have opened."""
        return after_thinking(self.completion_of(item), item.prompt, self.markers)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for a completion."""

    reward: float | None
    """Before the weight. Finite. None: the verifier abstains."""
    outcome: int
    """A value of the contract's Outcome."""
    reason: str
    parsed_answer: str = ""
    """The answer as read from the completion."""
    format_acc: float | None = None
    """1 or 0 for the required form, None if this verifier does not judge form."""
    ans_acc: float | None = None
    """1 or 0 for the answer. If no verifier of the item gives one, it follows from the outcome: 1 for CORRECT, else 0;
    but none if the outcome is UNJUDGED or `format_acc` is given."""
    tests: int = 0
    """Number of tests."""
    tests_passed: int | None = None
    """Tests that passed before the first failure; None: not known."""
    reference_is_text: bool = False
    """It compares mathematics, and the reference is none."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The service's resources for verifiers."""

    math: MathEquality
    sandbox: Sandbox | None = None
    """Runs programs; None: this service runs none."""
    reward_model: RewardModel | None = None
    """The learned reward model, if the service has one."""


class Verifier(Protocol):
    """Scores one completion."""

    name: ClassVar[str]
    """Its name in VerifierSpec.name: lower case, digits, underscores."""
    description: ClassVar[str]
    """What it checks, in a sentence."""
    parameters: ClassVar[type[Parameters]]
    """The model for VerifierSpec.parameters."""
    # It may have `reads`: what it compares the completion with, as VerifierScore.reads. Default: the reference answer.

    async def verify(self, item: reward_pb2.ScoreItem, parameters: Any, tools: Tools) -> Verdict:
        """Score `item` with an instance of this verifier's parameters. Must not block.

        Must be thread-safe until it awaits `admitted()`: long items are begun in a thread of their own, one at a time.

        Raises:
            VerifierFailure: there can be no verdict.
        """
        ...
