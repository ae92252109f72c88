"""The exceptions of the client."""

import grpc

# Codes of calls that were refused; with any other code the call was tried and failed.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAVAILABLE,
    }
)


class QuartetError(Exception):
    """A call failed; `str()` is one sentence for people.

    Attributes:
        code: the gRPC status, or None if no service was asked.
        retry_after: seconds after which the service suggests another try; None if it suggests none.
    """

    def __init__(self, message: str, code: grpc.StatusCode | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    @property
    def exit_code(self) -> int:
        """Exit status of a command that ends with this error: 2 if it was refused, 1 if it was tried and failed."""
        return 2 if self.code is None or self.code in _REFUSALS else 1


class InputError(QuartetError):
    """Invalid input of the caller: a file, a line, a field."""
