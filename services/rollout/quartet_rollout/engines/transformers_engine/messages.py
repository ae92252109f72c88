"""Messages between the rollout and its transformers engine's process: msgpack with raw arrays, in the framing of
`multiprocessing`.

The rollout sends lists of calls; a list is executed between the same two steps. The process sends reports.
"""

from __future__ import annotations

import asyncio
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from quartet_rollout.engines.base import EngineCompletion, EngineStats
from quartet_rollout.engines.weight_group import ModelSpec


class EngineCall(msgspec.Struct):
    """A call of a method of `EngineLoop`."""

    number: int
    """Number of its answer."""
    method: str
    args: tuple[Any, ...]


class EngineAnswer(msgspec.Struct):
    """The result of a call."""

    number: int
    result: Any = None
    error: list[str] | None = None
    """See `pack_error`."""


class Ready(msgspec.Struct, tag=True):
    """The model is loaded."""

    max_model_len: int
    vocab_size: int
    tokenizer: tuple[str, str]  # module and name of its class
    spec: ModelSpec
    transports: list[str]
    records_experts: bool
    """Whether `SamplingSettings.routed_experts` is supported."""


class Output(msgspec.Struct, tag=True):
    """New completions and answers, and the current state."""

    stats: EngineStats
    policy_version: int
    completions: list[tuple[int, EngineCompletion]]
    """(request number, completion)."""
    answers: list[EngineAnswer]


class Log(msgspec.Struct, tag=True):
    """A line for the rollout's log."""

    logger: str
    level: int
    text: str


class Failed(msgspec.Struct, tag=True):
    """The process exits because of an error."""

    reason: str


Report = Ready | Output | Log | Failed


def _array_to_wire(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_from_wire(kind: type, value: Any) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_CALLS = msgspec.msgpack.Decoder(list[EngineCall])
_REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=_array_from_wire)


class EnginePipe:
    """The child process's end of the socket. Any thread may send; one thread receives."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(os.dup(descriptor))
        self._sending = threading.Lock()
        self.poll = self._connection.poll
        """Whether `receive` would return or raise at once."""

    def send(self, report: Report) -> None:
        """Raises ConnectionError when the rollout is gone."""
        with self._sending:
            self._connection.send_bytes(_ENCODER.encode(report))

    def receive(self) -> list[EngineCall]:
        """Wait for calls. Raises EOFError or ConnectionError when the rollout is gone."""
        return _CALLS.decode(self._connection.recv_bytes())


def frame(calls: list[EngineCall]) -> bytes:
    """Encode calls for `EnginePipe.receive`."""
    body = _ENCODER.encode(calls)
    return len(body).to_bytes(4, "big") + body


async def read_report(reader: asyncio.StreamReader) -> Report:
    """Read a report of `EnginePipe.send`. Raises asyncio.IncompleteReadError or OSError when the process is gone."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return _REPORTS.decode(await reader.readexactly(size))
