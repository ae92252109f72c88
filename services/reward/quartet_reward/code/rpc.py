"""Remote calls in both directions: while a side waits for an answer, it serves the other side's calls."""

import builtins
import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

from quartet_reward.code.plain import Decoder, Encoder, Handles, Kind, Malformed, Remote, TooLarge

LARGEST_FRAME = 16 << 20
_HEADER = struct.Struct(">I")
# A unix stream is writable when at least three quarters of its buffer are free: a write of this size never blocks.
_CHUNK = 32 << 10
PATIENCE = 10.0
"""How much longer than allowed a program may take while it waits for a processor."""
_ASK_SECONDS = 0.1


class Gone(Exception):
    """The other side has closed its end."""


class Late(Exception):
    """The other side took too long, even for a busy machine."""


class Patience:
    """How long this side waits for the other one."""

    def __init__(self, allowed: float, on_late: Callable[[float, float], None]):
        """`on_late`: called with the seconds waited and allowed, when they are over and from time to time after."""
        self._allowed = allowed
        self._on_late = on_late
        self._waited = 0.0
        self._asks_at = allowed

    @property
    def left(self) -> float:
        """The seconds until `count` does something."""
        return max(0.0, self._asks_at - self._waited)

    def count(self, seconds: float) -> None:
        """Count a wait. Raises Late."""
        self._waited += seconds
        if self._waited > PATIENCE * self._allowed:
            raise Late("it took too long")
        if self._waited >= self._asks_at:
            self._on_late(self._waited, self._allowed)
            self._asks_at = self._waited + max(_ASK_SECONDS, self._allowed / 10)


class Channel:
    """Sends and receives frames. Reads and writes wait as long as each of `patience` allows; without one, for ever."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._poll = select.poll()
        self._unread = bytearray()
        self.patience: list[Patience] = []

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
            raise Malformed(f"a frame is not JSON: {error}") from None
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
        if not self.patience:
            return
        self._poll.register(self._descriptor, event)
        ready: list = []
        while not ready:
            began = time.monotonic()
            ready = self._poll.poll(1000 * min(each.left for each in self.patience) + 1)
            for each in self.patience:
                each.count(time.monotonic() - began)


Serve = Callable[[Any, str, tuple, dict[str, Any]], Any]
_DEEPEST_CALLS = 40
# Exceptions that the other side may raise here, by name: builtin ones derived from Exception.
_EXCEPTIONS = {
    name: each
    for name, each in vars(builtins).items()
    if isinstance(each, type) and issubclass(each, Exception) and not issubclass(each, BaseExceptionGroup)
}


class Peer:
    def __init__(self, channel: Channel, serve: Serve, proxies: dict[Kind, type[Remote]], lends_objects: bool = True):
        """Connect to the other side.

        Args:
            serve: handles its requests: serve(object or None, operation, arguments, keyword arguments).
            proxies: the proxy classes for its objects.
            lends_objects: see `Handles`.
        """
        self.channel = channel
        self.handles = Handles(self.ask, proxies, lends_objects)
        self._serve = serve
        self._asked = 0
        self._depth = 0

    def ask(self, number: int | None, operation: str, *arguments: Any, **named: Any) -> Any:
        """Perform an operation on the other side's object `number`; return the result.

        Changes there to containers among the arguments are made here too.

        Raises:
            Exception: what was raised there, by its builtin name, marked by `from_other_side`.
            Malformed, Gone, Late: there is no valid answer.
            TooLarge: the arguments are too large.
        """
        if self._depth >= _DEEPEST_CALLS:
            raise RecursionError(f"calls between program and test are nested deeper than {_DEEPEST_CALLS}")
        self._asked += 1
        question = self._asked
        encoder = Encoder(self.handles)
        value = encoder.value((arguments, tuple(named.items())))
        request = {"question": question, "on": number, "do": operation, "value": value, "nodes": encoder.nodes()}
        self.channel.send(request)
        self._depth += 1
        try:
            while "question" in (message := self.channel.receive()):
                self._answer(message)
        finally:
            self._depth -= 1
        if message.get("answer") != question:
            raise Malformed(f"an answer to {str(message.get('answer'))[:80]}; question {question} was asked")
        return self._outcome(message, encoder.containers)

    def serve_forever(self) -> None:
        """Serve requests. Raises Gone when the other side ends."""
        while True:
            self._answer(self.channel.receive())

    def _outcome(self, message: dict[str, Any], containers: list[Any]) -> Any:
        decoder = Decoder(self.handles, message.get("nodes"), containers)
        value = decoder.value(message.get("value"))
        changed = message.get("changed")
        if type(changed) is not list or any(type(each) is not list or len(each) != 2 for each in changed):
            raise Malformed("the changed containers are a list of pairs")
        for number, node in changed:
            decoder.fill(number, node)
        if "raised" in message:
            raise _exception(message["raised"], value)
        return value

    def _answer(self, message: dict[str, Any]) -> None:
        decoder = Decoder(self.handles, message.get("nodes"))
        match decoder.value(message.get("value")):
            case (tuple(arguments), tuple(pairs)) if all(
                type(pair) is tuple and len(pair) == 2 and type(pair[0]) is str for pair in pairs
            ):
                named = dict(pairs)
            case _:
                raise Malformed("a question holds arguments and named arguments")
        number, operation = message.get("on"), message.get("do")
        if type(operation) is not str:
            raise Malformed("an operation has a name")
        target = None if number is None else self.handles.lent(number)[0]
        try:
            self._reply(message, decoder.containers, self._serve(target, operation, arguments, named))
        except (Malformed, Gone, Late):
            raise
        except Exception as error:
            try:
                self._reply(message, decoder.containers, _plain_arguments(error), raised=_names(error))
            except (Gone, Late):
                raise
            except Exception as refusal:  # the changed containers cannot be encoded either
                self._reply(message, [], _plain_arguments(refusal), raised=_names(refusal))

    def _reply(
        self, message: dict[str, Any], containers: list[Any], value: Any, raised: list[str] | None = None
    ) -> None:
        encoder = Encoder(self.handles, containers)
        encoded = encoder.value(value)
        changed = []
        for number, container in enumerate(containers):
            node = encoder.node(container)
            # Compared as text, because 1, 1.0 and True are equal.
            if repr(node) != repr(message["nodes"][number]):
                changed.append([number, node])
        reply = {"answer": message.get("question"), "value": encoded, "nodes": encoder.nodes(), "changed": changed}
        self.channel.send(reply if raised is None else {**reply, "raised": raised})


def _names(error: BaseException) -> list[str]:
    return [each.__name__ for each in type(error).__mro__ if _EXCEPTIONS.get(each.__name__) is each]


def _plain_arguments(error: Exception) -> tuple:
    """Return an exception's arguments as plain data, or () if `args` or a `__str__` raises."""
    try:
        return tuple(each if type(each) in (int, float, str, bool, type(None)) else str(each) for each in error.args)
    except Exception:
        return ()


def _exception(names: Any, arguments: Any) -> Exception:
    if type(names) is not list or type(arguments) is not tuple:
        raise Malformed("an exception has a list of names, and arguments")
    kind = next((_EXCEPTIONS[name] for name in names if type(name) is str and name in _EXCEPTIONS), None)
    if kind is None:
        raise Malformed(f"{str(names)[:80]} is not a builtin exception")
    try:
        error = kind(*arguments)
    except Exception:  # some exceptions require certain arguments
        error = kind.__new__(kind)
    return from_other_side(error)


def from_other_side(error: Exception) -> Exception:
    """Return the exception, marked as raised by the other side."""
    error.from_other_side = True  # type: ignore[attr-defined]
    return error
