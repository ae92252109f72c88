"""Verifiers of plain text: `exact` compares it, `format` checks its form, `length` its number of tokens."""

from typing import Literal

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import fault_of_think_answer_form, last_boxed, last_tagged_answer
from quartet_reward.errors import InvalidItem
from quartet_reward.verifiers.answers import fault_of_box, require_answer
from quartet_reward.verifiers.base import CompletionParameters, Parameters, Tools, Verdict

_FOLDED_AT_ONCE = 1 << 20
_LARGEST_DEFAULT_BUFFER = 1024


class ExactParameters(CompletionParameters):
    correct_reward: float = Field(10.0, description="Reward of the same text.")
    answer_in: Literal["completion", "answer_tags", "box"] = Field(
        "completion",
        description="The answer is the whole completion, the last <answer> tags, or the last box; after the thought.",
    )
    ignore_case: bool = Field(False, description="Ignore case.")


class Exact:
    """The answer is the reference text, except for white space around it.

    >>> score("exact", " eight\\n", "eight")
    (10.0, 'correct')
    """

    name = "exact"
    description = (
        "What follows the thought (or its tagged or boxed answer) is the reference, except for white space around it."
    )
    parameters = ExactParameters

    async def verify(self, item: reward_pb2.ScoreItem, parameters: ExactParameters, tools: Tools) -> Verdict:
        require_answer(item)
        answer = _find(parameters.outside_thoughts(item), parameters.answer_in)
        if not answer:
            return Verdict(
                0.0,
                reward_pb2.OUTCOME_MALFORMED,
                f"no answer in the {parameters.answer_in}",
                format_acc=0.0,
                ans_acc=0.0,
            )
        expected = item.reference.answer.strip()
        same = _folded(answer) == _folded(expected) if parameters.ignore_case else answer == expected
        if same:
            return Verdict(parameters.correct_reward, reward_pb2.OUTCOME_CORRECT, "the same text", answer, 1.0, 1.0)
        return Verdict(0.0, reward_pb2.OUTCOME_INCORRECT, "not the text of the reference", answer, 1.0, 0.0)


def _folded(text: str) -> str:
    """Return text case-folded, in parts, because casefold() holds the GIL."""
    return "".join(text[at : at + _FOLDED_AT_ONCE].casefold() for at in range(0, len(text), _FOLDED_AT_ONCE))


def _find(text: str, place: str) -> str | None:
    if place == "answer_tags":
        return last_tagged_answer(text)
    if place == "box":
        return last_boxed(text)
    return text.strip()


class FormatParameters(CompletionParameters):
    form: Literal["think_answer_tags", "boxed"] = Field(
        "think_answer_tags", description="The required form: that of the verifier with this name."
    )
    reward: float = Field(1.0, description="Reward of the right form.")


class Format:
    """The completion has the form that another verifier requires. Needs no reference.

    >>> score("format", "so it is \\\\boxed{7}", form="boxed")
    (1.0, 'correct')
    """

    name = "format"
    description = "The completion has the required form and an answer, whatever it is."
    parameters = FormatParameters
    reads = ()

    async def verify(self, item: reward_pb2.ScoreItem, parameters: FormatParameters, tools: Tools) -> Verdict:
        if parameters.form == "think_answer_tags":
            text = parameters.completion_of(item)
            fault, answer = fault_of_think_answer_form(text, item.prompt), last_tagged_answer(text)
        else:
            answer = last_boxed(parameters.outside_thoughts(item))
            fault = fault_of_box(answer)
        if fault:
            return Verdict(0.0, reward_pb2.OUTCOME_MALFORMED, fault, answer or "", format_acc=0.0)
        return Verdict(parameters.reward, reward_pb2.OUTCOME_CORRECT, "the form is right", answer or "", format_acc=1.0)


class LengthParameters(Parameters):
    penalty: float = Field(10.0, ge=0, description="Largest penalty, at the limit and beyond.")
    max_tokens: int = Field(0, ge=0, description="The limit M, in tokens; 0: the item's max_new_tokens.")
    buffer_tokens: int = Field(0, ge=0, description="The buffer B, in tokens; 0: a quarter of M, at most 1024.")


class Length:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): long completions lose reward before they are cut off.

    -penalty · min(max(L - (M - B), 0), B) / B for L tokens, a limit M and a buffer B: 0 up to M - B, then falling to
    -penalty at M, where it stays. (ColossalChat's version jumps back to 0 at M.) Needs no reference.

    >>> score("length", "of 90 tokens", tokens=90, max_tokens=100, buffer_tokens=20)
    (-5.0, 'unjudged')
    """

    name = "length"
    description = "Soft overlong punishment: 0 until a buffer before the token limit, then falling linearly; at most 0."
    parameters = LengthParameters
    reads = ()

    async def verify(self, item: reward_pb2.ScoreItem, parameters: LengthParameters, tools: Tools) -> Verdict:
        limit = parameters.max_tokens or item.max_new_tokens
        if item.completion_tokens <= 0 or limit <= 0:
            raise InvalidItem(
                f"completion_tokens: got {item.completion_tokens}, max_new_tokens: got {item.max_new_tokens}; "
                "the verifier 'length' needs both to be positive (or its parameter max_tokens)"
            )
        buffer = min(parameters.buffer_tokens or min(_LARGEST_DEFAULT_BUFFER, max(limit // 4, 1)), limit)
        over = min(max(item.completion_tokens - (limit - buffer), 0), buffer)
        reason = f"{item.completion_tokens} of {limit} tokens, {over} of them in the buffer of {buffer}"
        return Verdict(-parameters.penalty * over / buffer, reward_pb2.OUTCOME_UNJUDGED, reason)


VERIFIERS = (Exact, Format, Length)
