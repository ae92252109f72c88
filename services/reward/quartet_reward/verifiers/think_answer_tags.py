"""`<think>…</think><answer>…</answer>` with a mathematical answer."""

from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import (
    fault_of_think_answer_form,
    last_tagged_answer,
    without_trailing_special_tokens,
)
from quartet_reward.verifiers.answers import AnswerParameters, judge_math
from quartet_reward.verifiers.base import Later, Tools, Verdict
from quartet_reward.verifiers.references import require_answer


class ThinkAnswerTags:
    """Each of the four tags once, in order, ending at `</answer>`; the answer is compared as mathematics."""

    name = "think_answer_tags"
    description = (
        "A thought in <think> tags, then an answer in <answer> tags that equals the reference mathematically; "
        "each tag once, nothing after </answer>."
    )
    parameters = AnswerParameters

    def verify(self, item: reward_pb2.ScoreItem, parameters: AnswerParameters, tools: Tools) -> Verdict | Later:
        require_answer(item)
        text = without_trailing_special_tokens(item.completion, parameters.special_tokens)
        answer = last_tagged_answer(text) or ""
        fault = fault_of_think_answer_form(text) or ("" if answer else "the answer is empty")
        return judge_math(answer, item.reference.answer, parameters, tools, fault=fault)
