"""Listings, page by page: an answer holds the messages that fit into it, and at least one."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from quartet_common.errors import invalid_argument

Position = tuple[float, str]
"""Score and id in the sorted set that is listed; the order of the listing."""
MessageT = TypeVar("MessageT", bound=Message)


def read_token(token: str) -> Position | None:
    """Return the position behind which a page begins, None for the first one."""
    score, colon, name = token.partition(":")
    try:
        return (float(score), name) if token else None
    except ValueError:
        raise invalid_argument("page_token", repr(token[:80]), "empty, or a next_page_token") from None


async def fill(
    entries: Sequence[Position],
    load: Callable[[list[str]], Awaitable[Sequence[MessageT | None]]],
    at_once: int,
    room: int,
    limit: int,
) -> tuple[list[MessageT], str]:
    """Return a page and the token of the next one, "" after the last.

    Args:
        entries: the listing from the page's beginning on.
        load: returns the message of each id; None for what is not there any more.
        at_once: ids of one `load`.
        room: bytes of the page's messages.
        limit: most messages.
    """
    page: list[MessageT] = []
    last = ""
    for start in range(0, len(entries), at_once):
        part = entries[start : start + at_once]
        for (score, name), message in zip(part, await load([name for _, name in part]), strict=True):
            if message is None:
                continue
            room -= message.ByteSize()
            if page and (room < 0 or len(page) == limit):
                return page, last
            page.append(message)
            last = f"{score!r}:{name}"
    return page, ""
