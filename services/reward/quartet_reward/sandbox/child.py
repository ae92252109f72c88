"""The new process: confine, read the payload, run the entry, end as a Python program ends."""

import atexit
import contextlib
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox.confine import PAYLOAD, STATUS

READY, OUT_OF_MEMORY = b"R", b"M"
"""What the service reads from the status pipe: the program began; a MemoryError ended it. Anything else before READY
says why there was no program."""
_MOST_FRAMES = 1000


def run(confine: Callable[[], None], entry: Callable[[bytes], None]) -> None:
    """Be the new process; does not return."""
    try:
        confine()
        payload = _read_payload()
        os.close(PAYLOAD)
        os.write(STATUS, READY)
    except BaseException as error:
        # Nothing of the program ran: the service makes this a SandboxUnavailable.
        with contextlib.suppress(OSError):
            os.write(STATUS, f"{type(error).__name__}: {error}".encode()[:512])
        os._exit(1)
    os._exit(_run(entry, payload))


def _read_payload() -> bytes:
    size = os.lseek(PAYLOAD, 0, os.SEEK_END)
    os.lseek(PAYLOAD, 0, os.SEEK_SET)
    parts = []
    while size > 0:
        part = os.read(PAYLOAD, size)
        if not part:
            raise EOFError("the payload is shorter than it was")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _run(entry: Callable[[bytes], None], payload: bytes) -> int:
    """Run the entry and what follows a program's end. Return the exit status."""
    try:
        status = _guarded(lambda: entry(payload))
        if threading.active_count() > 1:
            status = status or _guarded(threading._shutdown)  # type: ignore[attr-defined]
        status = status or _guarded(atexit._run_exitfuncs)
        return status or _guarded(_flush)
    except BaseException:  # what the program left behind raises even while its error is shown
        return 1


def _guarded(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as error:
        _guarded(_flush)
        code: Any = error.code
        if code is None:
            return 0
        if issubclass(type(code), int):  # whatever it calls its __class__
            return int.__and__(code, 0xFF)
        os.write(2, f"{code}\n".encode(errors="replace"))
        return 1
    except BaseException as error:
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            with contextlib.suppress(OSError):
                os.write(STATUS, OUT_OF_MEMORY)
        with contextlib.suppress(BaseException):
            _flush()
        _show(error)
        return 1
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _show(error: BaseException) -> None:
    """Write the traceback, without the sandbox's own frames."""
    linecache.clearcache()
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error), limit=-_MOST_FRAMES))
    os.write(2, text.encode(errors="replace"))


def _own_frames(error: BaseException):
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("quartet_reward.sandbox"):
        trace = trace.tb_next
    return trace
