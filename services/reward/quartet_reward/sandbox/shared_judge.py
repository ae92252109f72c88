"""A judge that stays, seen from the service: it is given one judgment after the other."""

import asyncio
import json
import os
import socket
import time
from dataclasses import replace
from typing import Any

from quartet_reward.sandbox import messages
from quartet_reward.sandbox.api import SHARED_JUDGE, Ending, Execution, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.run import JobRun, sealed

_MOST_JUDGMENTS = 1000
_EVER = 1e9
LEAST_MEMORY_BYTES = 256 << 20
"""With less, what one judgment leaves in memory could count in the next."""
_LARGEST_WORD = 1 << 16


def job(memory_bytes: int) -> Job:
    """Return the job that is such a judge. Each judgment has its own time; it cannot start processes."""
    limits = replace(Limits(), memory_bytes=memory_bytes, wall_seconds=_EVER, cpu_seconds=_EVER, processes=1)
    return Job(SHARED_JUDGE, b"", limits=limits)


class SharedJudge:
    """One process. `usable` tells whether it may be given another judgment."""

    def __init__(self, run: JobRun, channel: socket.socket, memory_bytes: int):
        """`channel`: the service's end of the socket that `run` has as its pair."""
        self.run = run
        self.memory_bytes = memory_bytes
        self.usable = True
        self._judgments = 0
        self._words: list[dict[str, Any]] = []
        self._spoken = asyncio.Event()
        self._channel = channel
        channel.setblocking(False)
        asyncio.get_running_loop().add_reader(channel, self._hear)

    async def await_ready(self) -> None:
        """Wait until it can judge; cancelling ends it. Raises SandboxUnavailable if it cannot begin."""
        try:
            await self._spoken.wait()
        except asyncio.CancelledError:
            self.end()
            raise
        if not self.usable:
            await self.run.ended.wait()
            self.run.execution()
            raise SandboxUnavailable("the judge ended before it was given anything")

    async def judge(self, job: Job, pair: int) -> Execution | None:
        """Have it judge, over the socket `pair`; None if it declines, and has not touched the socket.

        Whatever is out of the ordinary ends the process, and so does cancelling.

        Raises:
            SandboxUnavailable: its fork server has died.
        """
        began = time.perf_counter()
        self._judgments += 1
        self._words.clear()
        self._spoken.clear()
        killed_for: Ending | None = None
        again = False
        try:
            self._send(job, pair)
            async with asyncio.timeout(job.limits.wall_seconds):
                await self._spoken.wait()
            again = bool(self._words and self._words[-1].get("again")) and self._judgments < _MOST_JUDGMENTS
        except TimeoutError:
            killed_for = Ending.TIMED_OUT
        finally:
            if not again:
                self.end(killed_for)
        if self._words and self._words[-1].get("declined"):
            return None
        report = b"".join(json.dumps(word).encode() + b"\n" for word in self._words)
        if not (self._words and "finding" in self._words[-1]):
            await self.run.ended.wait()
            end, seconds = self.run.execution(), time.perf_counter() - began
            spent = min(seconds, end.cpu_seconds)  # which counts all its judgments
            return replace(end, report=report, wall_seconds=seconds, cpu_seconds=spent)
        return Execution(
            ending=Ending.EXITED,
            exit_code=0,
            signal=None,
            stdout=b"",
            stderr=b"",
            report=report,
            cpu_seconds=0.0,
            wall_seconds=time.perf_counter() - began,
            peak_memory_bytes=0,
            mode=self.run.mode,
        )

    def end(self, reason: Ending | None = None) -> None:
        """Kill it; may be called again. `run.ended` tells when it is gone."""
        self.run.kill(reason)
        if self.usable:
            self.usable = False
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._spoken.set()

    def _send(self, job: Job, pair: int) -> None:
        task = sealed(job.payload)
        try:
            messages.send(self._channel, {}, [task, pair])
        except OSError:
            self.end()  # it has just died; `judge` says how
        finally:
            os.close(task)

    def _hear(self) -> None:
        while self.usable:
            try:
                packet = self._channel.recv(_LARGEST_WORD)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.end()
                return
            word = json.loads(packet)
            self._words.append(word)
            if word.keys() & {"ready", "finding", "declined"}:
                self._spoken.set()
