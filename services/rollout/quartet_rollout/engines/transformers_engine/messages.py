"""What the rollout and the process of its transformers engine say to each other: msgpack, arrays as they lie in memory.

The process first says `Ready` or `Failed`, then takes `Generate` and `Call`, and reports by `Output`.
"""

from __future__ import annotations

import socket
import threading
from select import select
from typing import Any

import msgspec
import numpy as np

from quartet_rollout.engines.base import EngineCompletion, EngineStats, SamplingSettings
from quartet_rollout.weight_sync.spec import ModelSpec

HEAD = 4
"""Bytes that say how long a message is, little-endian."""


class Request(msgspec.Struct):
    """A prompt whose completions are wanted."""

    number: int
    """Which request it is, of all there ever were: names may come again."""
    prompt: list[int]
    n: int
    sampling: SamplingSettings


class Generate(msgspec.Struct, tag=True):
    """Requests that begin as one batch."""

    requests: list[Request]


class Call(msgspec.Struct, tag=True):
    """Call a method of the `EngineLoop` between two steps."""

    number: int
    """That its `Answer` has; 0: no answer is wanted."""
    method: str
    args: list[Any]


class Ready(msgspec.Struct, tag=True):
    """The model is loaded."""

    max_model_len: int
    vocab_size: int
    spec: ModelSpec
    transports: list[str]
    records_experts: bool
    """Whether `SamplingSettings.routed_experts` is served."""


class Answer(msgspec.Struct):
    """What a call returned."""

    number: int
    result: Any = None
    error: list[str] | None = None
    """See `pack_error`."""


class Output(msgspec.Struct, tag=True):
    """What is new since the last one, and the state after it."""

    stats: EngineStats
    policy_version: int
    completions: list[tuple[int, EngineCompletion]] = []
    """With the numbers of their requests."""
    answers: list[Answer] = []


class Log(msgspec.Struct, tag=True):
    """A line for the rollout's log."""

    logger: str
    level: int
    text: str


class Failed(msgspec.Struct, tag=True):
    """The process ends, for this reason."""

    reason: str


Order = Generate | Call
Report = Ready | Output | Log | Failed


def _to_wire(value: Any) -> Any:
    if isinstance(value, SamplingSettings):
        return value.model_dump()
    return value.dtype.str, value.shape, value.tobytes()


def _from_wire(kind: type, value: Any) -> Any:
    if kind is SamplingSettings:
        return SamplingSettings(**value)
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_ORDERS = msgspec.msgpack.Decoder(Order, dec_hook=_from_wire)
_REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=_from_wire)


def encode(message: Order | Report) -> bytes:
    """The message, its length before it."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def decode_report(body: bytes) -> Report:
    """A message of the process, without its length. Raises msgspec.MsgspecError."""
    return _REPORTS.decode(body)


class RolloutGone(Exception):
    """The other end of the socket is closed."""


class Channel:
    """The process's end of the socket. Any thread may send; one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, report: Report) -> None:
        """Raises RolloutGone."""
        message = encode(report)
        try:
            with self._sending:
                self._socket.sendall(message)
        except OSError as error:
            raise RolloutGone from error

    def poll(self) -> bool:
        """Whether `receive` would return, or raise, now."""
        return bool(select([self._socket], [], [], 0)[0])

    def receive(self) -> Order:
        """Wait for an order. Raises RolloutGone."""
        size = int.from_bytes(self._exactly(HEAD), "little")
        return _ORDERS.decode(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._socket.recv(size, socket.MSG_WAITALL)
        except OSError as error:
            raise RolloutGone from error
        if len(data) < size:
            raise RolloutGone
        return data
