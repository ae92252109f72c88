"""What a check finds."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at, in a word or two."""
    state: State
    """`failure`: the service will not work. `warning`: it will, until something happens."""
    what: str
    """What was found."""
    cure: str = ""
    """What to do about it; empty when all is well."""


def ok(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", what)


def warning(check: str, what: str, cure: str) -> Finding:
    """It works, until something happens."""
    return Finding(check, "warning", what, cure)


def failure(check: str, what: str, cure: str) -> Finding:
    """The service will not work."""
    return Finding(check, "failure", what, cure)
