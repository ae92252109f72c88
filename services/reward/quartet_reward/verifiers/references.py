"""Checks of an item's reference, made before its completion is looked at.

A bad reference is never the completion's fault.
"""

from quartet.v1 import reward_pb2

from quartet_reward.failures import VerifierFailure


def require_answer(item: reward_pb2.ScoreItem) -> None:
    """Raise VerifierFailure if the item has no reference answer."""
    if not item.reference.answer.strip():
        raise VerifierFailure(
            reward_pb2.FAILURE_KIND_BAD_REFERENCE,
            "reference.answer is empty; this verifier needs an answer to compare with",
        )
