"""Messages between the service and its workers: a JSON object in one line."""

import ctypes
import json
import os
import resource
import signal
import sys
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


_PR_SET_PDEATHSIG = 1


def begin(parent: int, nice: int = 0) -> BinaryIO:
    """Tie this process to its parent's life and return where its messages go; nothing else that is printed goes there.

    Args:
        parent: process id of the service; if it has died already, this process ends at once.
        nice: by how much its priority is lowered.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the request was made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends its workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def receive() -> dict[str, Any] | None:
    """Return the next request, None when there will be no more. Raises ValueError if it is none."""
    line = sys.stdin.buffer.readline()
    return unpack(line) if line else None


def send(output: BinaryIO, message: dict[str, Any]) -> None:
    output.write(pack(message))
    output.flush()
