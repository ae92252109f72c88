"""Messages between the service and its workers: four bytes of length, big-endian, then a JSON object in UTF-8."""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")
LARGEST_FRAME = 16 << 20


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return how many bytes follow the header. Raises ValueError if that is no frame of ours."""
    (length,) = HEADER.unpack(header)
    if length > LARGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {LARGEST_FRAME} are allowed")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """Return the message of a frame's body. Raises ValueError."""
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a frame holds a JSON object; got {type(message).__name__}")
    return message


_PR_SET_PDEATHSIG = 1


def begin(parent: int, nice: int = 0) -> BinaryIO:
    """Tie this process to its parent's life and return where its frames go; nothing else that is printed goes there.

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
    """Return the next request, None when there will be no more. Raises ValueError if it is no frame."""
    source = sys.stdin.buffer
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return unpack(source.read(body_length(header)))


def send(output: BinaryIO, message: dict[str, Any]) -> None:
    output.write(pack(message))
    output.flush()
