"""Messages between the service and its workers: four bytes of length, big-endian, then a JSON object in UTF-8."""

import json
import struct
from typing import Any

HEADER = struct.Struct(">I")
LARGEST_FRAME = 16 << 20


def pack(message: dict[str, Any]) -> bytes:
    """Return the frame of a message."""
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
