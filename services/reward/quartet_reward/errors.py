"""The failures of the reward service."""

import sys
import traceback

from quartet.v1 import reward_pb2

from quartet_common.text import error_text

_LONGEST_TRACEBACK = 4000


class VerifierFailure(Exception):
    """There is no verdict, through no fault of the completion. Becomes a Failure in the result, never a reward."""

    def __init__(self, kind: int, message: str, place: str = "", traceback: str = ""):
        """The arguments are the fields of the contract's Failure; `kind` is a FailureKind."""
        super().__init__(message)
        reward_pb2.FailureKind.Name(kind)  # raises ValueError for any other number
        self.kind = kind
        self.message = message
        self.place = place
        self.traceback = traceback

    @staticmethod
    def of_exception(name: str, module: str, error: BaseException) -> "VerifierFailure":
        """Return the failure of verifier `name`, defined in `module`, which raised another exception."""
        place = _place(module, error)
        return VerifierCrashed(
            f"verifier '{name}' raised {error_text(error)} ({place})",
            place,
            "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
        )

    @property
    def retryable(self) -> bool:
        """Whether the same item may succeed later or on another server."""
        return self.kind not in (reward_pb2.FAILURE_KIND_BAD_REFERENCE, reward_pb2.FAILURE_KIND_INVALID_ITEM)


class BadReference(VerifierFailure):
    """The item's reference answer or tests cannot be used."""

    def __init__(self, message: str):
        super().__init__(reward_pb2.FAILURE_KIND_BAD_REFERENCE, message)


class InvalidItem(VerifierFailure):
    """The item lacks what its verifier needs."""

    def __init__(self, message: str):
        super().__init__(reward_pb2.FAILURE_KIND_INVALID_ITEM, message)


class VerifierCrashed(VerifierFailure):
    """A verifier failed by itself."""

    def __init__(self, message: str, place: str = "", traceback: str = ""):
        super().__init__(reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, message, place, traceback)


class ShuttingDown(VerifierFailure):
    """The service stops: waiting and running items are not scored."""

    def __init__(self) -> None:
        super().__init__(reward_pb2.FAILURE_KIND_SHUT_DOWN, "the reward service is shutting down")


def _place(module: str, error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame in `module`, or else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module), "__file__", None)
    own = [frame for frame in frames if frame.filename == file]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
