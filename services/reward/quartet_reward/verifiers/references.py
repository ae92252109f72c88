"""Checks of an item's reference, made before its completion is looked at.

A bad reference is never the completion's fault.
"""

from quartet.v1 import reward_pb2

from quartet_reward.errors import VerifierFailure

_LONGEST_ANSWER = 1_000_000


def require_answer(item: reward_pb2.ScoreItem) -> None:
    """Raise VerifierFailure if the item has no reference answer, or one that no completion could give."""
    if len(item.reference.answer) > _LONGEST_ANSWER:
        raise VerifierFailure(
            reward_pb2.FAILURE_KIND_BAD_REFERENCE,
            f"reference.answer has {len(item.reference.answer)} characters; allowed: at most {_LONGEST_ANSWER}",
        )
    if not item.reference.answer.strip():
        raise VerifierFailure(
            reward_pb2.FAILURE_KIND_BAD_REFERENCE,
            "reference.answer is empty; this verifier needs an answer to compare with",
        )
