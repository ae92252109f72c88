"""What a table of cases is made of.

Each service has such a table in `cases_NAME.py`: by RPC, its cases. A case builds its request in a `World` (channels to
running services, a name of its own, helpers that arrange what must stand before) and says what the answer must be.
Cases know the protos and nothing of how a service is built. `tables` puts its `rpc` into each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from quartet_contract.world import World

Request: TypeAlias = Message | Sequence[Message]
"""One message, or the messages of a client's stream."""

Answer: TypeAlias = Any
"""One message, or the list of the messages of a server's stream."""


@dataclass(frozen=True)
class Good:
    """A call that must succeed. If the proto calls the RPC idempotent it is made twice."""

    title: str
    request: Callable[[World], Request]
    check: Callable[[World, Answer], None]
    """Raises AssertionError."""
    volatile: tuple[str, ...] = ()
    """Fields, at any depth, in which the answers of the same call made twice may differ: clocks, mostly."""
    second: Callable[[World, Answer], None] | None = None
    """What the second answer must be, where it is another than the first by the contract."""
    once: str = ""
    """Why an idempotent call is made once here."""
    take: int = 0
    """Messages to read of a stream that does not end by itself."""
    last: bool = False
    """The call ends the service: it comes after all other tests."""
    rpc: str = ""


@dataclass(frozen=True)
class Bad:
    """A call that must be refused."""

    title: str
    request: Callable[[World], Request]
    code: grpc.StatusCode
    names: str
    """With INVALID_ARGUMENT: the field that google.rpc.BadRequest names. Else: a part of the sentence."""
    server: str = ""
    """Which server is called, if not the usual one of the service."""
    take: int = 0
    rpc: str = ""


@dataclass(frozen=True)
class Refused:
    """Bad input that the contract answers inside a response of status OK."""

    title: str
    request: Callable[[World], Request]
    check: Callable[[World, Answer], None]
    rpc: str = ""


@dataclass(frozen=True)
class NoBadInput:
    """An RPC whose request cannot be wrong, and which works in every state."""

    reason: str
    rpc: str = ""


def has(**fields: object) -> Callable[[World, Answer], None]:
    """A check: the fields of the answer have these values."""

    def check(w: World, answer: Answer) -> None:
        assert {name: getattr(answer, name) for name in fields} == fields

    return check


Tried: TypeAlias = Good | Bad | Refused
Case: TypeAlias = Tried | NoBadInput
