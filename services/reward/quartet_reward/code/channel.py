"""Frames on a descriptor: four bytes of length, big-endian, then JSON. Neither side trusts what it reads."""

import json
import os
import select
import struct
import time
from typing import Any

LARGEST_FRAME = 16 << 20
_HEADER = struct.Struct(">I")
# Writable, for a unix stream, means that at least three quarters of its buffer are free: so much never blocks.
_CHUNK = 32 << 10


class Malformed(Exception):
    """What came is not what the other side of the protocol may send."""


class Gone(Exception):
    """The other side has closed its end."""


class Late(Exception):
    """The deadline passed."""


class TooLarge(Exception):
    """What was to be sent exceeds a limit."""


class NotPlain(Exception):
    """What was to be sent is an object, and none is to cross."""


class Channel:
    """Frames both ways. With a `deadline` (of `time.monotonic`) no read and no write waits longer."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._poll = select.poll()
        self._unread = bytearray()
        self.deadline: float | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises TooLarge, Gone or Late."""
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        if len(body) > LARGEST_FRAME:
            raise TooLarge(f"data of {len(body)} bytes; at most {LARGEST_FRAME} may cross between program and test")
        rest = memoryview(_HEADER.pack(len(body)) + body)
        while rest:
            self._await(select.POLLOUT)
            try:
                rest = rest[os.write(self._descriptor, rest[:_CHUNK]) :]
            except OSError as error:
                raise Gone(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises Malformed, Gone or Late."""
        (length,) = _HEADER.unpack(self._take(_HEADER.size))
        if length > LARGEST_FRAME:
            raise Malformed(f"a frame of {length} bytes; at most {LARGEST_FRAME} are allowed")
        try:
            message = json.loads(self._take(length))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a frame that is no JSON: {error}") from None
        if type(message) is not dict:
            raise Malformed(f"a frame holds an object; got {type(message).__name__}")
        return message

    def _take(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._await(select.POLLIN)
            try:
                part = os.read(self._descriptor, max(_CHUNK, count - len(self._unread)))
            except OSError as error:
                raise Gone(str(error)) from error
            if not part:
                raise Gone("end of the connection")
            self._unread += part
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    def _await(self, event: int) -> None:
        if self.deadline is None:
            return
        self._poll.register(self._descriptor, event)
        if not self._poll.poll(max(0.0, (self.deadline - time.monotonic()) * 1000)):
            raise Late("the deadline passed")
