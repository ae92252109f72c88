"""What the service and a fork server say to each other: one JSON object a packet, with descriptors beside it."""

import array
import json
import os
import socket
from typing import Any

_MOST_BYTES = 65536
_MOST_DESCRIPTORS = 16


class Closed(Exception):
    """The other side has gone."""


def send(channel: socket.socket, message: dict[str, Any], descriptors: list[int] | tuple[int, ...] = ()) -> None:
    """Send a message. Raises OSError (BlockingIOError if the channel does not block and is full)."""
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([json.dumps(message).encode()], attached)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which do not survive exec.

    Raises:
        Closed: the other side has gone.
        BlockingIOError: there is none, and the channel does not block.
    """
    try:
        data, attached, _, _ = channel.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
    except ConnectionError as error:
        raise Closed from error
    descriptors = array.array("i")
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % 4])
    if not data:
        raise Closed
    return json.loads(data), list(descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
