"""What is said of an episode that was not played to its end, in the worker process: the fields of EpisodeFailure."""

from collections.abc import Iterator
from typing import Any

from quartet_common.python_file import describe
from quartet_common.text import encodable

_LONGEST_MESSAGE, LONGEST_TRACEBACK = 1000, 10_000
# Statuses of an answer after which a client may try again.
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
# Bases of the errors of clients that got no answer: of the openai, httpx, aiohttp and requests packages.
_NO_ANSWER = frozenset({"APIConnectionError", "TransportError", "ClientConnectionError", "RequestException"})


def failed(message: str, retryable: bool, place: str = "", traceback: str = "") -> dict[str, Any]:
    """Return the answer for an episode that failed."""
    return {
        "event": "failed",
        "message": encodable(message, _LONGEST_MESSAGE),
        "retryable": retryable,
        "place": encodable(place, _LONGEST_MESSAGE),
        "traceback": encodable(traceback[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK),
    }


def of_exception(name: str, file: str, error: BaseException) -> dict[str, Any]:
    """Return the answer for an agent, of environment `name` in `file`, that raised.

    It is retryable if the agent got no answer from somewhere, or was told to come back: then the agent is not to blame.
    """
    retryable = any(_is_passing(each) for each in _causes(error))
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    try:
        what = describe(error, file)
    except Exception as failure:  # its text cannot be made
        what = {"reason": f"raised {type(error).__name__} ({failure!r})", "place": file, "traceback": ""}
    message = f"environment '{name}' {what['reason']} ({what['place']})"
    return failed(message, retryable, what["place"], what["traceback"])


def _causes(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    yield error
    if depth < 20:
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for each in (*inner, error.__cause__):
            if each is not None:
                yield from _causes(each, depth + 1)


def _is_passing(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status in _RETRYABLE_STATUSES or status >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(names & _NO_ANSWER)
