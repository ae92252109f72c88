"""What agents print, in the service's log: bounded, never parsed."""

import asyncio
import os
import time

from quartet_common.log import get_logger

log = get_logger("quartet_environment.agent")

_BURST_BYTES = 64 << 10
_BYTES_PER_SECOND = 16 << 10
_LONGEST_LINE = 2000
_COUNTED_SECONDS = 1.0  # from the first dropped byte until the count is logged: the agent may print nothing more


class OutputLog(asyncio.Protocol):
    """Logs the lines of a pipe, at most 64 KiB at once and 16 KiB a second; counts what it drops."""

    def __init__(self, environment: str, pid: int):
        self._fields = {"environment": environment, "worker": pid}
        self._allowed, self._since = float(_BURST_BYTES), time.monotonic()
        self._rest, self._dropped = b"", 0

    async def read(self, pipe: int) -> None:
        """Log until the pipe ends, which is then closed."""
        self._ended = asyncio.get_running_loop().create_future()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(pipe, "rb", 0))
        try:
            await self._ended
        finally:
            transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._allowed = min(_BURST_BYTES, self._allowed + (now - self._since) * _BYTES_PER_SECOND)
        self._since = now
        if len(data) > self._allowed:
            if not self._dropped:
                asyncio.get_running_loop().call_later(_COUNTED_SECONDS, self._say_dropped)
            self._dropped += len(data)
            self._rest = b""
            return
        self._allowed -= len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line)
        if len(self._rest) > _LONGEST_LINE:
            self._say(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._say(self._rest)
        self._say_dropped()
        if not self._ended.done():
            self._ended.set_result(None)

    def _say(self, line: bytes) -> None:
        if text := line[:_LONGEST_LINE].decode(errors="replace").rstrip():
            log.info("%s", text, extra=self._fields)

    def _say_dropped(self) -> None:
        if self._dropped:
            log.warning("%d bytes that agents printed were dropped", self._dropped, extra=self._fields)
            self._dropped = 0
