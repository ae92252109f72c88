"""What every worker process begins with, and how it hears and answers: the other side of `worker_process`."""

import ctypes
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from quartet_reward import frames

_PR_SET_PDEATHSIG = 1


def begin(parent: int) -> BinaryIO:
    """Tie this process to its parent's life and return where its frames go; nothing else that is printed goes there.

    Args:
        parent: process id of the service; if it has died already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the request was made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends its workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def receive() -> dict[str, Any] | None:
    """Return the next request, None when there will be no more. Raises ValueError if it is no frame."""
    source = sys.stdin.buffer
    header = source.read(frames.HEADER.size)
    if len(header) < frames.HEADER.size:
        return None
    return frames.unpack(source.read(frames.body_length(header)))


def send(output: BinaryIO, message: dict[str, Any]) -> None:
    """Answer."""
    output.write(frames.pack(message))
    output.flush()
