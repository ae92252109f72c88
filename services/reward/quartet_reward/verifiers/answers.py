"""Verifiers of mathematical answers: `boxed`, `think_answer_tags`, and `math`, which reads tags, boxes and prose."""

from functools import cached_property
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import (
    THINK_ANSWER_TAGS,
    fault_of_think_answer_form,
    last_boxed,
    last_tagged_answer,
)
from quartet_reward.errors import BadReference
from quartet_reward.math.choices import letters_of, paired
from quartet_reward.math.compare import EqualityPolicy
from quartet_reward.math.extract import ReadingPolicy, final_answer, reference_answer
from quartet_reward.verifiers.base import CompletionParameters, Tools, Verdict

_LONGEST_ANSWER = 1_000_000
Tag = Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)]


def require_answer(item: reward_pb2.ScoreItem) -> None:
    """Raise BadReference if the item's reference answer is empty or too long."""
    if len(item.reference.answer) > _LONGEST_ANSWER:
        raise BadReference(
            f"reference.answer has {len(item.reference.answer)} characters; allowed: at most {_LONGEST_ANSWER}"
        )
    if not item.reference.answer.strip():
        raise BadReference("reference.answer is empty; this verifier needs an answer to compare with")


def fault_of_box(answer: str | None) -> str:
    """Return why a box's content, None if there is no box, is no answer; "" if it is."""
    return "" if answer else "the box is empty" if answer == "" else "there is no complete \\boxed{} after the thought"


class AnswerParameters(CompletionParameters):
    """Rewards for mathematical answers; the defaults are ColossalChat's."""

    correct_reward: float = Field(10.0, description="Reward of a right answer in the right form.")
    string_match_reward: float = Field(
        5.0, description="Reward where the reference is not mathematics and the answer is the same text."
    )
    format_reward: float = Field(0.0, description="Reward of the right form with a wrong answer.")
    unevaluated: bool = Field(False, description="A number may be answered by a computation: 391 by 17*23.")

    @cached_property
    def equality(self) -> EqualityPolicy:
        return EqualityPolicy(unevaluated=self.unevaluated)


async def judge_math(answer: str, reference: str, parameters: AnswerParameters, tools: Tools, fault: str) -> Verdict:
    """Compare an answer with the reference, both as read. A `fault` (why its form is wrong) makes it MALFORMED.

    Even then the reference is checked first, so that whether an item fails never depends on its completion.
    """
    compared_answer, reference = paired(answer, reference)
    compared = await tools.math.compare(None if fault else compared_answer, reference, parameters.equality)
    text = compared.reference_is_text
    if fault:
        return Verdict(
            0.0, reward_pb2.OUTCOME_MALFORMED, fault, answer, format_acc=0.0, ans_acc=0.0, reference_is_text=text
        )
    right = compared.outcome == reward_pb2.OUTCOME_CORRECT
    right_reward = parameters.string_match_reward if compared.as_text else parameters.correct_reward
    reward = right_reward if right else parameters.format_reward
    return Verdict(reward, compared.outcome, compared.reason, answer, 1.0, float(right), reference_is_text=text)


class Boxed:
    """The last complete box after the thought; the answer is compared as mathematics.

    >>> score("boxed", "so it is \\\\boxed{8.0}", "8")
    (10.0, 'correct')
    """

    name = "boxed"
    description = (
        "An answer in \\boxed{} that equals the reference mathematically; "
        "the last box counts, a box in <think> does not."
    )
    parameters = AnswerParameters

    async def verify(self, item: reward_pb2.ScoreItem, parameters: AnswerParameters, tools: Tools) -> Verdict:
        require_answer(item)
        answer = last_boxed(parameters.outside_thoughts(item))
        reference = reference_answer(item.reference.answer)
        return await judge_math(answer or "", reference, parameters, tools, fault_of_box(answer))


class TagParameters(AnswerParameters):
    """Parameters of `think_answer_tags`."""

    tags: tuple[Tag, Tag, Tag, Tag] = Field(
        THINK_ANSWER_TAGS, description="The texts that open and close the thought, then the answer; all different."
    )

    @field_validator("tags")
    @classmethod
    def _differ(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if any(one != other and one in other for one in tags for other in tags) or len(set(tags)) < len(tags):
            raise ValueError(f"got {list(tags)}; allowed: four texts, none of which is part of another")
        return tags


class ThinkAnswerTags:
    """Each of the four tags once, in order, ending at `</answer>`; the answer is compared as mathematics.

    >>> score("think_answer_tags", "<think>2+6</think><answer>8</answer>", "8")
    (10.0, 'correct')
    """

    name = "think_answer_tags"
    description = (
        "A thought in <think> tags, then an answer in <answer> tags that equals the reference mathematically; "
        "each tag once, nothing after </answer>."
    )
    parameters = TagParameters

    async def verify(self, item: reward_pb2.ScoreItem, parameters: TagParameters, tools: Tools) -> Verdict:
        require_answer(item)
        text = parameters.completion_of(item)
        fault = fault_of_think_answer_form(text, item.prompt, parameters.tags)
        reference = reference_answer(item.reference.answer)
        return await judge_math(
            last_tagged_answer(text, *parameters.tags[2:]) or "", reference, parameters, tools, fault
        )


class MathParameters(EqualityPolicy, ReadingPolicy, AnswerParameters):
    """Parameters of `math`."""

    @cached_property
    def equality(self) -> EqualityPolicy:
        return EqualityPolicy(**self.model_dump(include=set(EqualityPolicy.model_fields)))

    @cached_property
    def reading(self) -> ReadingPolicy:
        return ReadingPolicy(**self.model_dump(include=set(ReadingPolicy.model_fields)))


class Math:
    """The answer in tags, boxes or prose; compared as mathematics.

    >>> score("math", "The answer is 8.", "8")
    (10.0, 'correct')
    """

    name = "math"
    description = (
        "An answer in <answer> tags, in \\boxed{} or in prose (the answer is ...) that equals the reference "
        "mathematically; text in <think> is ignored."
    )
    parameters = MathParameters

    async def verify(self, item: reward_pb2.ScoreItem, parameters: MathParameters, tools: Tools) -> Verdict:
        require_answer(item)
        reference = reference_answer(item.reference.answer, parameters.reading)
        answer = final_answer(parameters.outside_thoughts(item), parameters.reading, letters_of(reference)) or ""
        fault = "" if answer else f"no answer after the thought (read: {parameters.described()})"
        return await judge_math(answer, reference, parameters, tools, fault)


VERIFIERS = (Boxed, Math, ThinkAnswerTags)
