"""What is raised where no verdict can be found."""

import sys
import traceback

from quartet.v1 import reward_pb2

from quartet_common.text import error_text

_LONGEST_TRACEBACK = 4000


class VerifierFailure(Exception):
    """No verdict could be found, through no fault of the completion. Becomes the contract's Failure, never a number."""

    def __init__(self, kind: int, message: str, place: str = "", traceback: str = ""):
        """`kind` is a value of the contract's FailureKind. `place`, `traceback`: where a verifier's program raised, as
        the contract's Failure has them.
        """
        super().__init__(message)
        reward_pb2.FailureKind.Name(kind)  # raises ValueError for any other number
        self.kind = kind
        self.message = message
        self.place = place
        self.traceback = traceback

    @staticmethod
    def of_exception(name: str, module: str, error: BaseException) -> "VerifierFailure":
        """Return the failure of the verifier `name`, of that module, which raised something else."""
        place = _place(module, error)
        return VerifierCrashed(
            f"verifier '{name}' raised {error_text(error)} ({place})",
            place,
            "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
        )

    @property
    def retryable(self) -> bool:
        """True if the same item may succeed later or elsewhere."""
        return self.kind not in (reward_pb2.FAILURE_KIND_BAD_REFERENCE, reward_pb2.FAILURE_KIND_INVALID_ITEM)


class BadReference(VerifierFailure):
    """What the item is compared with or tested by cannot be used."""

    def __init__(self, message: str):
        super().__init__(reward_pb2.FAILURE_KIND_BAD_REFERENCE, message)


class InvalidItem(VerifierFailure):
    """The item lacks what its verifier needs."""

    def __init__(self, message: str):
        super().__init__(reward_pb2.FAILURE_KIND_INVALID_ITEM, message)


class VerifierCrashed(VerifierFailure):
    """A verifier failed by itself; arguments as VerifierFailure's."""

    def __init__(self, message: str, place: str = "", traceback: str = ""):
        super().__init__(reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, message, place, traceback)


class ShuttingDown(VerifierFailure):
    """The service ends: what waits or runs is not done."""

    def __init__(self) -> None:
        super().__init__(reward_pb2.FAILURE_KIND_SHUT_DOWN, "the reward service is shutting down")


def _place(module: str, error: BaseException) -> str:
    """Return FILE:LINE: the innermost line in a module; where it has none, the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module), "__file__", None)
    own = [frame for frame in frames if frame.filename == file]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
