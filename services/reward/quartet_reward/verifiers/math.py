"""A mathematical answer wherever the completion states it: in tags, in boxes, or in prose."""

from typing import Literal

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import after_thinking, without_trailing_special_tokens
from quartet_reward.math.compare import EqualityPolicy
from quartet_reward.math.extract import ReadingPolicy, final_answer, reference_answer
from quartet_reward.verifiers.answers import AnswerParameters, judge_math
from quartet_reward.verifiers.base import Later, Tools, Verdict
from quartet_reward.verifiers.references import require_answer


class MathParameters(AnswerParameters):
    """Parameters of `math`: rewards, which answer is read, and what counts as equal."""

    answer_in: Literal["anywhere", "answer_tags", "box", "prose"] = Field(
        "anywhere", description="Where the answer is read; anywhere: the last <answer> tags, else boxes, else prose."
    )
    boxes: Literal["joined", "last"] = Field(
        "joined", description="Boxes side by side (\\boxed{1} and \\boxed{2}) are one list, or the last alone counts."
    )
    prose: Literal["numbers", "formulas"] = Field(
        "numbers", description="In prose, numbers and words are read as well, or formulas ($...$) only."
    )
    choices: list[str] = Field(
        [], max_length=64, description="The letters of a multiple-choice question; the answer is then one of them."
    )
    chains: Literal["each", "last"] = Field(
        "each", description="Of x = 3 + 4 = 8: each side must be the value, or the last one alone counts."
    )
    bare_braces: Literal["set", "group"] = Field(
        "set", description="{1, 2} without backslashes is a set, or the bare list 1, 2 as TeX prints it."
    )
    relations_as_sets: bool = Field(True, description="The set (1, 2) may be answered by 1 < x < 2.")
    any_names: bool = Field(False, description="Variables count by their place: f(x) is f(y).")
    decimal_places: int = Field(6, ge=1, le=15, description="Places in which a decimal and another number must agree.")
    guards: bool = Field(
        True, description="False: read and decide as math-verify alone does, to compare with figures of others."
    )

    @property
    def reading(self) -> ReadingPolicy:
        """Which answer is read."""
        return ReadingPolicy(self.answer_in, self.boxes, self.prose, tuple(self.choices))

    @property
    def equality(self) -> EqualityPolicy:
        """What counts as equal."""
        return EqualityPolicy(
            chains=self.chains,
            bare_braces=self.bare_braces,
            relations_as_sets=self.relations_as_sets,
            any_names=self.any_names,
            decimal_places=self.decimal_places,
            guards=self.guards or bool(self.choices),
            formulas_only=not self.guards and self.prose == "formulas",
        )


class Math:
    """The answer that the completion states, in whatever form; compared as mathematics."""

    name = "math"
    description = (
        "An answer in <answer> tags, in \\boxed{} or in prose (the answer is ...) that equals the reference "
        "mathematically; what stands in <think> is not read."
    )
    parameters = MathParameters

    def verify(self, item: reward_pb2.ScoreItem, parameters: MathParameters, tools: Tools) -> Verdict | Later:
        require_answer(item)
        text = without_trailing_special_tokens(item.completion, parameters.special_tokens)
        policy, reference = parameters.reading, item.reference.answer
        if not parameters.guards and not parameters.choices:
            return judge_math(text, reference, parameters, tools, parameters.equality)
        answer = final_answer(after_thinking(text), policy) or ""
        fault = "" if answer else f"no answer is stated after the thought (read: {policy.described()})"
        return judge_math(
            answer, reference_answer(reference, policy), parameters, tools, parameters.equality, fault=fault
        )
