"""What the verifiers of a final answer share: their parameters, and the way from an equality to a verdict."""

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import SPECIAL_TOKENS
from quartet_reward.math.compare import STRICT, EqualityPolicy
from quartet_reward.math.equality import Equality, Relation
from quartet_reward.verifiers.base import Later, Parameters, SpecialTokens, Tools, Verdict

_OUTCOMES = {
    Relation.EQUAL: reward_pb2.OUTCOME_CORRECT,
    Relation.SAME_TEXT: reward_pb2.OUTCOME_CORRECT,
    Relation.DIFFERENT: reward_pb2.OUTCOME_INCORRECT,
    Relation.TIMED_OUT: reward_pb2.OUTCOME_TIMED_OUT,
    Relation.OUT_OF_MEMORY: reward_pb2.OUTCOME_RESOURCE_EXCEEDED,
}


class AnswerParameters(Parameters):
    """Rewards of a verifier of mathematical answers; the defaults are ColossalChat's."""

    correct_reward: float = Field(10.0, description="Reward of a right answer in the right form.")
    string_match_reward: float = Field(
        5.0, description="Reward where the reference is no mathematics and the answer is the same text."
    )
    format_reward: float = Field(0.0, description="Reward of the right form where the answer is not right.")
    special_tokens: SpecialTokens = Field(
        list(SPECIAL_TOKENS), description="Tokens that may stand at the end of a completion; they are not read."
    )


def judge_math(
    answer: str,
    reference: str,
    parameters: AnswerParameters,
    tools: Tools,
    policy: EqualityPolicy = STRICT,
    *,
    fault: str = "",
) -> Verdict | Later:
    """Compare an answer with the reference, or say what is the `fault` of its form: it then counts as not given.

    Both only if the reference can be used: whether an item is scored never depends on its completion.
    """
    equality = tools.math.compare(None if fault else answer, reference, policy)

    def verdict(equality: Equality) -> Verdict:
        if fault:
            return Verdict(0.0, reward_pb2.OUTCOME_MALFORMED, fault, answer, format_acc=0.0, ans_acc=0.0)
        return _verdict(answer, equality, parameters)

    if isinstance(equality, Equality):
        return verdict(equality)

    async def later() -> Verdict:
        return verdict(await equality())

    return later


def _verdict(answer: str, equality: Equality, parameters: AnswerParameters) -> Verdict:
    outcome = _OUTCOMES[equality.relation]
    if equality.relation is Relation.EQUAL:
        reward = parameters.correct_reward
    elif equality.relation is Relation.SAME_TEXT:
        reward = parameters.string_match_reward
    else:
        reward = parameters.format_reward
    right = 1.0 if outcome == reward_pb2.OUTCOME_CORRECT else 0.0
    return Verdict(
        reward, outcome, equality.reason, answer, format_acc=1.0, ans_acc=right, queued_seconds=equality.queued_seconds
    )
