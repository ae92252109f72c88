"""The sandbox's interface: jobs, limits and executions."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

LATE = b"late "
"""Begins a line that a judge writes to its report pipe, with the seconds that it has waited for the program, and may.
The service knows how long the program waited for a processor, and kills it if it has used up its time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one execution may use. Each limit is for the whole process tree unless it says otherwise."""

    wall_seconds: float = 10.0
    """Wall time of the program; then the tree is killed."""
    cpu_seconds: float = 10.0
    """CPU time, user and system."""
    memory_bytes: int = 512 << 20
    """Memory of the tree, its scratch space included."""
    processes: int = 16
    """Processes and threads at one time."""
    scratch_bytes: int = 32 << 20
    """Size of the private /tmp, the only writable folder."""
    file_bytes: int = 16 << 20
    """Size of one file."""
    open_files: int = 64
    """File descriptors of each process."""
    output_bytes: int = 1 << 20
    """Standard output and standard error, each; the tree is killed at the first byte beyond."""
    patience: float = 1.0
    """While the program waits for a processor, its wall time does not count, up to this multiple of `wall_seconds`."""

    def __post_init__(self) -> None:
        """Raise ValueError if no memory is left beside the scratch space."""
        if self.memory_bytes <= self.scratch_bytes:
            raise ValueError(
                f"memory_bytes must exceed scratch_bytes, which it includes; it is {self.memory_bytes} to "
                f"{self.scratch_bytes}"
            )


class ExitReason(StrEnum):
    """How an execution ended, through the program itself. Any other end raises SandboxUnavailable."""

    EXITED = "exited"
    """The main process exited with `exit_code`."""
    SIGNALLED = "signalled"
    """A signal that the sandbox did not send ended the main process. SIGKILL only for a job that was given up."""
    TIMED_OUT = "timed_out"
    """Killed at `wall_seconds` or `cpu_seconds`."""
    MEMORY_EXCEEDED = "memory_exceeded"
    """Killed at `memory_bytes`, or ended by an uncaught MemoryError."""
    OUTPUT_EXCEEDED = "output_exceeded"
    """Killed at `output_bytes`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One execution."""

    entry: Literal["script", "candidate", "judge"]
    """`script` runs `payload` as UTF-8 Python source in `__main__`; `candidate` and `judge` are the two sides of
    judged execution. The fork server imports the entry's module before it forks; it never reads the payload."""
    payload: bytes | bytearray
    """Read by the new process after it is confined."""
    stdin: bytes | bytearray = b""
    """Standard input."""
    limits: Limits = field(default_factory=Limits)
    reports: bool = False
    """Whether it gets a pipe to the service, descriptor 4."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a job ended."""

    ending: ExitReason
    exit_code: int | None
    """Of a program that EXITED."""
    signal: int | None
    """Of a program that was SIGNALLED."""
    stdout: bytes | bytearray
    """At most `output_bytes`. More than 1 MiB is the buffer that it was read into: to copy it would take long."""
    stderr: bytes | bytearray
    """At most `output_bytes`."""
    report: bytes
    """What it wrote to the report pipe, if it has one."""
    cpu_seconds: float
    """CPU time of the main process and its children that it waited for."""
    wall_seconds: float
    """Wall time of the program."""
    waited_seconds: float = 0.0
    """How much of it a process or thread of the tree, the one that waited most, was ready and no processor was free; as
    sampled every 100 ms."""


class SandboxUnavailable(Exception):
    """The sandbox could not run the job, through no fault of the program."""


class KilledFromOutside(SandboxUnavailable):
    """Something outside the sandbox, e.g. the OOM killer or an operator, killed the job or the fork server."""
