"""What a verifier raises when it can find no verdict."""

from quartet.v1 import reward_pb2


class VerifierFailure(Exception):
    """No verdict could be found, through no fault of the completion. Becomes the contract's Failure, never a number."""

    def __init__(self, kind: int, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    @property
    def retryable(self) -> bool:
        """True if the same item may succeed later or elsewhere."""
        return self.kind not in (reward_pb2.FAILURE_KIND_BAD_REFERENCE, reward_pb2.FAILURE_KIND_INVALID_ITEM)
