"""What the rollout and an engine's process say to each other: JSON, and arrays as they lie in memory.

to the process      {"engine", "model_path", "options", "log_level"}, once
                    {"ask": number, "method", "args"}: a method of `Stepping`
                    {"close": true}
from the process    {"started": facts} or {"failed": [error, text]}, once
                    {"answer": number, "result"} or {"answer": number, "failed": [error, text]}
                    {"mail": [[request, completion or [error, text]], …]}
                    {"log": [logger, level, text]}
                    and with each but the last, or alone: {"stats", "version"}, as they are after it
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from quartet_rollout.engines.base import (
    EngineCompletion,
    EngineError,
    PromptError,
    SamplingMask,
    SamplingSettings,
    WeightInstallError,
    WeightTransferError,
)
from quartet_rollout.engines.stepping import Mail, Request

_ERRORS = {error.__name__: error for error in (EngineError, PromptError, WeightInstallError, WeightTransferError)}
_HEAD = 4  # Bytes that say how long the JSON is.


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        """Own a connected stream socket."""
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, body: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Raises OSError when the other end is gone.

        Args:
            body: anything that JSON knows.
            arrays: one-dimensional.
        """
        head = json.dumps({**body, "arrays": [[array.dtype.str, array.nbytes] for array in arrays]}).encode()
        message = b"".join([len(head).to_bytes(_HEAD, "little"), head, *(array.tobytes() for array in arrays)])
        with self._sending:
            self._connection.send_bytes(message)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Wait for a message. Raises EOFError or OSError when the other end is gone."""
        message = self._connection.recv_bytes()
        offset = _HEAD + int.from_bytes(message[:_HEAD], "little")
        body = json.loads(message[_HEAD:offset])
        arrays = []
        for kind, size in body.pop("arrays"):
            arrays.append(np.frombuffer(message[offset : offset + size], dtype=kind))
            offset += size
        return body, arrays

    def close(self) -> None:
        """Let the other end know that nothing will come."""
        self._connection.close()


def pack_error(error: BaseException) -> list[str]:
    """An EngineError by name and text; other errors are told as one."""
    name = type(error).__name__
    return [name if name in _ERRORS else EngineError.__name__, str(error)]


def unpack_error(packed: Sequence[str]) -> EngineError:
    """See `pack_error`."""
    return _ERRORS[packed[0]](packed[1])


def pack_requests(requests: Sequence[Request]) -> tuple[list[Any], list[np.ndarray]]:
    """A list for the body, and arrays."""
    packed = [[request.number, request.request_id, request.n, request.sampling.model_dump()] for request in requests]
    return packed, [np.array(request.prompt, dtype=np.int32) for request in requests]


def unpack_requests(packed: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[Request]:
    """See `pack_requests`."""
    requests = []
    for (number, request_id, n, sampling), prompt in zip(packed, arrays, strict=True):
        requests.append(Request(number, request_id, prompt.tolist(), n, SamplingSettings(**sampling)))
    return requests


def pack_mail(mail: Sequence[Mail]) -> tuple[list[Any], list[np.ndarray]]:
    """A list for the body, and arrays."""
    packed: list[Any] = []
    arrays: list[np.ndarray] = []
    for number, item in mail:
        if isinstance(item, EngineError):
            packed.append([number, pack_error(item)])
            continue
        masked = item.mask is not None
        packed.append([number, [item.index, item.finish_reason, item.version_spans, masked]])
        arrays += [item.token_ids, item.log_probs]
        if item.mask is not None:
            arrays += [item.mask.counts, item.mask.token_ids]
    return packed, arrays


def unpack_mail(packed: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[Mail]:
    """See `pack_mail`."""
    mail: list[Mail] = []
    left = iter(arrays)
    for number, item in packed:
        if len(item) == 2:
            mail.append((number, unpack_error(item)))
            continue
        index, finish_reason, spans, masked = item
        completion = EngineCompletion(
            index=index,
            token_ids=next(left),
            log_probs=next(left),
            finish_reason=finish_reason,
            version_spans=tuple((version, begin, end) for version, begin, end in spans),
            mask=SamplingMask(next(left), next(left)) if masked else None,
        )
        mail.append((number, completion))
    return mail
