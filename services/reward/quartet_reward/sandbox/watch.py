"""What a process tree uses beyond what the kernel limits: the sum over its processes.

Each process has limits of its own (address space, processor time); the memory and the time of several together are
looked up here, ten times a second. While there is one process, its own limits are exact and nothing is looked up.
"""

import contextlib
import os
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 4096
INTERVAL_SECONDS = 0.1
_PF_EXITING = 4


@dataclass(frozen=True)
class Usage:
    """What a tree uses now."""

    processes: int
    memory_bytes: int
    """Resident, what is shared with the fork server not counted."""
    cpu_seconds: float


def pid_of(handle: int) -> int:
    """Return the process of a pidfd, 0 if it has ended."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pid:"):
                    return max(0, int(line[4:]))
    except OSError:
        return 0
    return 0


def usage(roots: list[int], idle: int, base_bytes: int) -> Usage:
    """Add up the processes in `roots` and below. `idle` (0: none) is one that only waits, and is not counted.

    `base_bytes`: what each has in common with the fork server. A process that ends meanwhile is left out.
    """
    seen: set[int] = set()
    waiting = [*roots, idle] if idle else list(roots)
    memory, seconds = 0, 0.0
    while waiting and len(seen) < _MOST_PROCESSES:
        pid = waiting.pop()
        if pid in seen or pid <= 0:
            continue
        seen.add(pid)
        try:
            waiting += _children(pid)
            if pid != idle:
                with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                    memory += max(0, int(file.read().split()[1]) * _PAGE - base_bytes)
                seconds += sum(map(int, _stat(str(pid))[11:15])) / _TICKS
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Usage(len(seen) - (1 if idle in seen else 0), memory, seconds)


def has_threads(handle: int) -> bool:
    """Tell whether a pidfd's process has a thread that has not begun to exit."""
    pid = pid_of(handle)
    # It may be reaped before its folder is opened, or before that is read.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not int(_stat(f"{pid}/task/{thread}")[6]) & _PF_EXITING:
                    return True
    return False


def _stat(task: str) -> list[str]:
    """The fields of a process's or thread's `stat`, from its state on."""
    with open(f"/proc/{task}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def works() -> bool:
    """Tell whether this kernel lists children."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")
