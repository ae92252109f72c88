"""Messages between the service and its workers: a JSON object in one line."""

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
    """Be a worker: load what answers, say so, and answer requests until there are no more, or one answer is the `last`.

    This process's life is tied to its parent's. Its answers go to standard output; what else is printed, to the log.

    Args:
        parent: process id of the service; if it has died already, this process ends at once.
        load: returns what answers a request.
        nice: by how much its priority is lowered.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the request was made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends its workers
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
