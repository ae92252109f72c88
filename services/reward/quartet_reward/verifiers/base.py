"""The interface of a verifier.

A verifier answers at once with a Verdict, or returns the rest of its work as a function of no arguments that gives an
awaitable Verdict. The service calls that function when there is room in its queue; what is answered at once never
queues. A truth about the completion is a Verdict; if the verifier cannot find one, it raises VerifierFailure.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import SPECIAL_TOKENS
from quartet_reward.math.equality import MathEquality
from quartet_reward.queue import CURRENT_RUN
from quartet_reward.reward_model import RewardModel
from quartet_reward.sandbox.pool import Sandbox

LARGEST_NUMBER = 1e18
"""Of a weight or a float parameter: the product of two, and the sum of hundreds of products, is finite in float32."""
NUMBER_ALLOWED = f"a finite number, at most {LARGEST_NUMBER:g} in size"


class Parameters(BaseModel):
    """Parameters of a verifier. Unknown keys are refused, and floats that are not finite or beyond `LARGEST_NUMBER`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*")
    @classmethod
    def _within_bounds(cls, value: Any) -> Any:
        if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(NUMBER_ALLOWED)
        return value


SpecialTokens = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64)]
"""Tokens that may stand at the end of a completion."""


class CompletionParameters(Parameters):
    """Of a verifier that reads the text of a completion."""

    special_tokens: SpecialTokens = Field(
        list(SPECIAL_TOKENS), description="Tokens that may stand at the end of a completion; they are not read."
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier found out about a completion."""

    reward: float | None
    """Before the weight. Finite. None: no verdict; the other verifiers' are the item's."""
    outcome: int
    """A value of the contract's Outcome."""
    reason: str
    """Why, in words."""
    parsed_answer: str = ""
    """The answer as read from the completion."""
    format_acc: float | None = None
    """1 or 0 for the required form, None if this verifier does not judge form."""
    ans_acc: float | None = None
    """1 or 0 for the answer. If no verifier of the item gives one, the outcomes say it: 1 for CORRECT, 0 for any other;
    but nothing where the outcome is UNJUDGED or `format_acc` is given."""
    tests: int = 0
    """Tests that it was put to."""
    tests_passed: int | None = None
    """Tests that passed before the first that did not; None: not known."""


Later = Callable[[], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class Tools:
    """What the service lends to its verifiers."""

    math: MathEquality
    sandbox: Sandbox | None = None
    """Where programs run. None: this service runs none."""
    reward_model: RewardModel | None = None
    """The learned reward model. None: this service has none."""

    @property
    def run_id(self) -> str:
        """The run of the item that the current task scores: what `queue` queues by."""
        return CURRENT_RUN.get()


class Verifier(Protocol):
    """Scores one completion."""

    name: ClassVar[str]
    """In VerifierSpec.name: lower case, digits, underscores."""
    description: ClassVar[str]
    """What it checks, in a sentence."""
    parameters: ClassVar[type[Parameters]]
    """The model of VerifierSpec.parameters."""

    def verify(self, item: reward_pb2.ScoreItem, parameters: Any, tools: Tools) -> Verdict | Later:
        """Score `item`. `parameters` is an instance of this verifier's model. Must not block.

        A long item is scored in a thread, one at a time, while the event loop's thread scores others.

        Raises:
            VerifierFailure: no verdict can be found.
        """
        ...
