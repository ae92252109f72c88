"""Runs a command and kills all its descendants at the end; standard library only.

    python guard.py GRACE_SECONDS PARENT COMMAND...

PARENT is the process id of the caller. The guard is the parent of a service and, as a subreaper, adopts every orphaned
descendant of it, also one in a session of its own (worker pools, engine processes):

    the command exits            its descendants are killed; the guard exits with its status (signal n: 128 + n)
    SIGTERM, SIGINT or SIGHUP    SIGTERM is sent to the command; after the grace, or at a second signal, all are killed
    the guard's parent dies      as SIGTERM (even if the parent was killed by SIGKILL)
    the guard itself is killed   the kernel kills the command
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def guarded(command: list[str], grace: float) -> list[str]:
    """Return the command line that runs `command` under a guard of the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(grace), str(os.getpid()), *command]


def main(arguments: list[str]) -> int:
    """Run the command and return its status."""
    grace, parent, command = float(arguments[0]), int(arguments[1]), arguments[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before PR_SET_PDEATHSIG took effect
        return 128 + signal.SIGTERM
    child = _start(command)
    deadline: float | None = None
    while True:
        received = _wait_for_signal(deadline)
        if received in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and deadline is None:
            deadline = time.monotonic() + grace
            _send(child, signal.SIGTERM)
        elif received != signal.SIGCHLD:  # a second signal, or the grace is over
            _send(child, signal.SIGKILL)
        status = _reap(child)
        if status is not None:
            _kill_descendants()
            return status


def _start(command: list[str]) -> int:
    """Start the command in its own process group and return its pid; the kernel kills it when the guard dies."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _wait_for_signal(deadline: float | None) -> int | None:
    """Return the next signal, or None at the deadline."""
    if deadline is None:
        return signal.sigwaitinfo(_SIGNALS).si_signo
    information = signal.sigtimedwait(_SIGNALS, max(0.0, deadline - time.monotonic()))
    return information.si_signo if information else None


def _reap(child: int) -> int | None:
    """Reap all processes that ended; return the child's status as a shell reports it, or None while it runs."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            result = code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill all descendants: each killed process's children become the guard's, and are killed in the next round."""
    while children := _children():
        for pid in children:
            _send(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children() -> list[int]:
    me = os.getpid()
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == me]


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has exited


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has exited


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
