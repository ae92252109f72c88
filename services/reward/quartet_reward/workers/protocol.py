"""The protocol between the service and its workers, one JSON object per line, and a worker's main loop."""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

LONGEST_LINE = 16 << 20


def pack(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def unpack(line: bytes) -> dict[str, Any]:
    """Return a line's message. Raises ValueError."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a line holds a JSON object; got {type(message).__name__}")
    return message


Answer = Callable[[dict[str, Any]], dict[str, Any]]
_PR_SET_PDEATHSIG = 1


def serve(parent: int, load: Callable[[], Answer], nice: int = 0) -> None:
    """Run a worker's main loop: load, send "ready", answer requests until standard input ends or an answer is `last`.

    The kernel kills this process when its parent dies. Answers go to standard output, whatever else is printed to
    standard error, the service's log.

    Args:
        parent: process id of the service; if that is no longer the parent, this process exits at once.
        load: returns the function that answers requests.
        nice: added to the process's nice value.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before prctl took effect
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the service, which ends its workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        answer, message = load(), {"event": "ready"}
        output.write(pack(message))
        output.flush()
        for line in sys.stdin.buffer:
            message = answer(unpack(line))
            output.write(pack(message))
            output.flush()
            if message.get("last"):
                return
