"""`\\boxed{…}` with a mathematical answer."""

from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import after_thinking, last_boxed, without_trailing_special_tokens
from quartet_reward.verifiers.answers import AnswerParameters, judge_math
from quartet_reward.verifiers.base import Later, Tools, Verdict
from quartet_reward.verifiers.references import require_answer


class Boxed:
    """The last complete box after the thought; the answer is compared as mathematics."""

    name = "boxed"
    description = (
        "An answer in \\boxed{} that equals the reference mathematically; "
        "the last box counts, a box in <think> does not."
    )
    parameters = AnswerParameters

    def verify(self, item: reward_pb2.ScoreItem, parameters: AnswerParameters, tools: Tools) -> Verdict | Later:
        require_answer(item)
        answer = last_boxed(after_thinking(without_trailing_special_tokens(item.completion, parameters.special_tokens)))
        fault = (
            ""
            if answer
            else "there is no complete \\boxed{} after the thought"
            if answer is None
            else "the box is empty"
        )
        return judge_math(answer or "", item.reference.answer, parameters, tools, fault=fault)
