"""The form alone, whatever the answer."""

from typing import Literal

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import (
    SPECIAL_TOKENS,
    after_thinking,
    fault_of_think_answer_form,
    last_boxed,
    last_tagged_answer,
    without_trailing_special_tokens,
)
from quartet_reward.verifiers.base import Parameters, Tools, Verdict


class FormatParameters(Parameters):
    """Parameters of `format`."""

    form: Literal["think_answer_tags", "boxed"] = Field(
        "think_answer_tags", description="The required form: that of the verifier of this name."
    )
    reward: float = Field(1.0, description="Reward of the right form.")
    special_tokens: list[str] = Field(
        list(SPECIAL_TOKENS), description="Tokens that may stand at the end of a completion; they are not read."
    )


class Format:
    """The completion has the form that another verifier requires. Needs no reference."""

    name = "format"
    description = "The completion has the required form, whatever its answer."
    parameters = FormatParameters

    def verify(self, item: reward_pb2.ScoreItem, parameters: FormatParameters, tools: Tools) -> Verdict:
        text = without_trailing_special_tokens(item.completion, parameters.special_tokens)
        if parameters.form == "think_answer_tags":
            fault, answer = fault_of_think_answer_form(text), last_tagged_answer(text)
        else:
            answer = last_boxed(after_thinking(text))
            fault = "there is no complete \\boxed{} after the thought" if answer is None else ""
        if fault:
            return Verdict(0.0, reward_pb2.OUTCOME_MALFORMED, fault, answer or "", format_acc=0.0)
        return Verdict(parameters.reward, reward_pb2.OUTCOME_CORRECT, "the form is right", answer or "", format_acc=1.0)
