"""How a program is judged, whatever the style of its tests."""

from dataclasses import dataclass, replace
from typing import Literal

from quartet_reward.sandbox.api import Limits


@dataclass(frozen=True, slots=True)
class Rules:
    """The verifier's parameters that are about judging."""

    timeout_seconds: float
    """For each case, or for a whole test program; wall time and processor time alike."""
    total_seconds: float
    """For all cases."""
    memory_bytes: int
    output_bytes: int
    by_tokens: bool
    any_order: bool
    tolerance: float
    checker: str
    arguments: Literal["auto", "list", "lines"]
    usual_imports: bool
    strict: bool
    prefix: str
    """Source that every program begins with."""

    def limits(self, seconds: float) -> Limits:
        """Return the limits of a program that may take so long."""
        return replace(
            Limits(),
            wall_seconds=seconds,
            cpu_seconds=seconds,
            memory_bytes=self.memory_bytes,
            output_bytes=self.output_bytes,
        )
