"""Errors that several modules raise."""

from quartet_broker import validation
from quartet_common.errors import ContractError, failed_precondition, not_found, resource_exhausted


def over_share(what: str, held: int, most: int, retry_seconds: float | None = None) -> ContractError:
    """Return the error for a caller that would exceed its share."""
    return resource_exhausted(
        what,
        f"the certificate '{validation.owner()}' holds {held} and may hold at most {most} (broker.max_caller_share)",
        retry_seconds,
    )


def other_layout(theirs: str, ours: str) -> ContractError:
    """Return the error about a run, begun by another build, that this one can delete but not work on."""
    return failed_precondition(
        "run",
        f"its data in Redis have layout {theirs}, and this broker's is {ours}: finish it with the build that began it, "
        "or delete it",
    )


def run_not_found(run_id: str) -> ContractError:
    """Return the error about a run that does not exist."""
    return not_found("run", run_id, "make it with CreateRun")
