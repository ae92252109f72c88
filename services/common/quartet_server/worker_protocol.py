"""The protocol between a service and its worker processes, one JSON object per line, and the worker's side of it."""

import ctypes
import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

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


def become_worker(parent: int, nice: int = 0) -> tuple[BinaryIO, BinaryIO]:
    """Make this process a worker: return the files from which it reads requests and to which it writes answers.

    The kernel kills it when its parent dies. Its standard input is then empty and its standard output is its standard
    error, for itself and for the programs that it starts.

    Args:
        parent: process id of the service; if that is no longer the parent, this process exits at once.
        nice: added to the process's nice value.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before prctl took effect
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the service, which ends its workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def serve(parent: int, load: Callable[[], Answer], nice: int = 0) -> None:
    """Run the main loop of a worker that answers one request at a time.

    It loads, sends "ready", and answers until its requests end or an answer is `last`.

    Args:
        parent, nice: as in `become_worker`.
        load: returns the function that answers requests.
    """
    requests, answers = become_worker(parent, nice)
    answer, message = load(), {"event": "ready"}
    answers.write(pack(message))
    answers.flush()
    for line in requests:
        message = answer(unpack(line))
        answers.write(pack(message))
        answers.flush()
        if message.get("last"):
            return
