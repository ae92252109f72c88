"""What a sandbox is given, and what it answers."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limits:
    """What one execution may use. Each limit is for the execution's whole process tree unless it says otherwise."""

    wall_seconds: float = 10.0
    """From the first instruction of the program to the moment that the tree is killed."""
    cpu_seconds: float = 10.0
    """Processor time, user and system."""
    memory_bytes: int = 512 << 20
    """Memory of the tree, its scratch space included."""
    processes: int = 16
    """Processes and threads at one time."""
    scratch_bytes: int = 32 << 20
    """Size of the private /tmp, the only place that can be written."""
    file_bytes: int = 16 << 20
    """Size of one file."""
    open_files: int = 64
    """File descriptors of each process."""
    output_bytes: int = 1 << 20
    """Standard output and standard error, each; the tree is killed at the first byte beyond."""

    def __post_init__(self) -> None:
        """Raise ValueError if a program could not even begin."""
        if self.memory_bytes <= self.scratch_bytes:
            raise ValueError(
                f"memory_bytes must exceed scratch_bytes, which it includes; it is {self.memory_bytes} to "
                f"{self.scratch_bytes}"
            )


class ExitReason(StrEnum):
    """How an execution ended. Every ending is a truth about the program; what is not raises SandboxUnavailable."""

    EXITED = "exited"
    """The main process left by itself, with `exit_code`."""
    SIGNALLED = "signalled"
    """A signal that the sandbox did not send ended the main process. SIGKILL only if nobody waited for it any more."""
    TIMED_OUT = "timed_out"
    """Killed at `wall_seconds` or `cpu_seconds`."""
    MEMORY_EXCEEDED = "memory_exceeded"
    """Killed at `memory_bytes`, or ended by a MemoryError that nobody caught."""
    OUTPUT_EXCEEDED = "output_exceeded"
    """Killed at `output_bytes`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One execution: a preloaded entry of the fork server, and what to hand to it after the fork."""

    entry: Literal["script", "candidate", "judge"]
    """`script` runs `payload` as UTF-8 Python source in `__main__`; `candidate` and `judge` are the two sides of
    judged execution. The entry's module is imported before the fork; the payload never is in the fork server."""
    payload: bytes
    """Read by the new process alone, after it is confined."""
    stdin: bytes = b""
    """Standard input; ends after these bytes."""
    limits: Limits = field(default_factory=Limits)
    reports: bool = False
    """It has a pipe to the service, descriptor 4."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a job ended."""

    ending: ExitReason
    exit_code: int | None
    """Status of a program that EXITED."""
    signal: int | None
    """Number of the signal of a program that was SIGNALLED."""
    stdout: bytes
    """At most `output_bytes`."""
    stderr: bytes
    """At most `output_bytes`."""
    report: bytes
    """What it wrote to that pipe, if it has one."""
    cpu_seconds: float
    """Processor time of the whole tree."""
    wall_seconds: float
    """Wall time of the program."""


class SandboxUnavailable(Exception):
    """The sandbox could not run the job, through no fault of the program: retry, or set aside. Never a verdict."""


class KilledFromOutside(SandboxUnavailable):
    """Something else than the sandbox killed the job or its fork server: an OOM killer, an operator."""
