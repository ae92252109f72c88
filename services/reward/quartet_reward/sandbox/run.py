"""One job under way, seen from the service: its pipes, its clock, and what became of it."""

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from quartet_reward.sandbox.api import Execution, ExitReason, Job, KilledFromOutside, SandboxUnavailable
from quartet_reward.sandbox.child import OUT_OF_MEMORY, READY
from quartet_reward.sandbox.server_handle import ServerHandle

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 4096
INTERVAL_SECONDS = 0.1
_PF_EXITING = 4

_CHUNK = 65536
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# A killed tree is gone in milliseconds; this is for a machine that swaps.
_DEATH_SECONDS = 10.0
_START_SECONDS = 10.0
_STATUS_BYTES = 4096
# Share of its processor time after which a signal is the kernel's at the limit. The kernel sends SIGXCPU, and SIGKILL a
# second later, by a clock that counts ticks; the time that it reports after the end was seen to be 25% less on a busy
# machine. SIGKILL may come from outside, SIGXCPU from the program itself.
_SPENT = {signal.SIGXCPU: 0.5, signal.SIGKILL: 0.8}


@dataclass(frozen=True)
class Usage:
    """What a tree uses now."""

    processes: int
    memory_bytes: int
    """Resident, what is shared with the fork server not counted."""
    cpu_seconds: float


def pid_of(handle: int) -> int:
    """Return the process of a pidfd, 0 if it has ended."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pid:"):
                    return max(0, int(line[4:]))
    except OSError:
        return 0
    return 0


def tree_usage(roots: list[int], idle: int, base_bytes: int) -> Usage:
    """Add up the processes in `roots` and below. `idle` (0: none) is one that only waits, and is not counted.

    `base_bytes`: what each has in common with the fork server. A process that ends meanwhile is left out.
    """
    seen: set[int] = set()
    waiting = [*roots, idle] if idle else list(roots)
    memory, seconds = 0, 0.0
    while waiting and len(seen) < _MOST_PROCESSES:
        pid = waiting.pop()
        if pid in seen or pid <= 0:
            continue
        seen.add(pid)
        try:
            waiting += _children(pid)
            if pid != idle:
                with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                    memory += max(0, int(file.read().split()[1]) * _PAGE - base_bytes)
                seconds += sum(map(int, _stat(str(pid))[11:15])) / _TICKS
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Usage(len(seen) - (1 if idle in seen else 0), memory, seconds)


def has_threads(handle: int) -> bool:
    """Tell whether a pidfd's process has a thread that has not begun to exit."""
    pid = pid_of(handle)
    # It may be reaped before its folder is opened, or before that is read.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not int(_stat(f"{pid}/task/{thread}")[6]) & _PF_EXITING:
                    return True
    return False


def _stat(task: str) -> list[str]:
    """The fields of a process's or thread's `stat`, from its state on."""
    with open(f"/proc/{task}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


class _Stream:
    """The service's end of a pipe that a program writes to."""

    def __init__(self, most: int, overflow: Callable[[], None] | None):
        """`overflow`: called at the first byte beyond `most`; None: nothing is read before the program's end."""
        self._most = most
        self._overflow = overflow
        self.data = bytearray()
        self._own, self.theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.theirs, True)
        if overflow:
            asyncio.get_running_loop().add_reader(self._own, self.read)
        self.open = True

    def read(self) -> None:
        while self.open:
            try:
                chunk = os.read(self._own, _CHUNK)
            except BlockingIOError:
                return
            self.data += chunk
            if not chunk:
                self.close()
            elif len(self.data) > self._most:
                del self.data[self._most :]
                self.close()
                if self._overflow:
                    self._overflow()

    def close(self) -> None:
        if self.open:
            self.open = False
            if self._overflow:
                asyncio.get_running_loop().remove_reader(self._own)
            os.close(self._own)


class JobRun:
    """Starts at once; `ended` is set when its process tree is gone."""

    def __init__(
        self,
        server: ServerHandle,
        slot: int,
        job: Job,
        pair: int | None = None,
    ):
        """`pair`: the descriptor of a socket for the program, which stays the caller's. Raises SandboxUnavailable."""
        self._server, self._job = server, job
        self._killed_for: ExitReason | None = None
        self._doomed = False
        self._killed = False
        self._lost = False
        self._problem = ""
        self._result: dict[str, Any] = {}
        self._handle = self._main_handle = -1
        self._began = self._finished = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        self.survived = False
        """Whether somebody held a pipe of the program after its process tree was gone."""
        self._streams: list[_Stream] = []
        passed: dict[str, int] = {}
        try:
            self._out = self._stream(job.limits.output_bytes, lambda: self.kill(ExitReason.OUTPUT_EXCEEDED))
            self._err = self._stream(job.limits.output_bytes, lambda: self.kill(ExitReason.OUTPUT_EXCEEDED))
            self._status = self._stream(_STATUS_BYTES, None)
            passed |= {"stdout": self._out.theirs, "stderr": self._err.theirs, "status": self._status.theirs}
            self._report: _Stream | None = None
            if job.reports:
                self._report = self._stream(job.limits.output_bytes, lambda: self.kill(ExitReason.OUTPUT_EXCEEDED))
                passed["report"] = self._report.theirs
            passed["payload"] = sealed(job.payload)
            if job.stdin:
                passed["stdin"] = sealed(job.stdin)
            streams = passed if pair is None else {**passed, "pair": pair}
            message = {"entry": job.entry, "streams": list(streams), "limits": asdict(job.limits)}
            self._name = server.send(slot, message, list(streams.values()), self._hear)
        except SandboxUnavailable:
            self._close_streams()
            raise
        except OSError as error:
            self._close_streams()
            raise SandboxUnavailable(f"the service cannot hand a program over: {error}") from error
        finally:
            for descriptor in passed.values():
                os.close(descriptor)
        self._timer = asyncio.get_running_loop().call_later(_START_SECONDS, self._give_up, "it did not begin")

    def kill(self, reason: ExitReason | None) -> None:
        """Kill the process tree. `reason`: the ending to report; the first one given counts."""
        if self.ended.is_set():
            return
        self._killed_for = self._killed_for or reason
        self._doomed = True
        if self._handle < 0:
            return
        self._killed = self._killed or has_threads(self._main_handle)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._set_timer(_DEATH_SECONDS, self._give_up, "its process tree did not die")

    def execution(self) -> Execution:
        """Return how it ended, after `ended`. Raises KilledFromOutside, SandboxUnavailable."""
        if self._lost:
            raise KilledFromOutside(self._problem)
        status = bytes(self._status.data)
        foreign = self._result.get("signal") == signal.SIGKILL and not self._killed
        if foreign and self._ending(status) is ExitReason.SIGNALLED:
            raise KilledFromOutside(
                "something outside the sandbox killed the program, as the kernel does without memory"
            )
        unneeded = self._doomed and not (self._killed_for or status)  # and killed before it began
        if not self._problem and not unneeded and not status.startswith(READY):
            self._problem = f"no confinement: {status.decode(errors='replace') or 'the process died'}"
        if self._problem:
            raise SandboxUnavailable(self._problem)
        ending = self._ending(status)
        result = self._result
        return Execution(
            ending=ending,
            exit_code=result["exit_code"] if ending is ExitReason.EXITED else None,
            signal=result["signal"] if ending is ExitReason.SIGNALLED else None,
            stdout=bytes(self._out.data),
            stderr=bytes(self._err.data),
            report=bytes(self._report.data) if self._report else b"",
            cpu_seconds=result["cpu_seconds"],
            wall_seconds=self._finished - self._began,
        )

    def _ending(self, status: bytes) -> ExitReason:
        limits, result = self._job.limits, self._result
        if self._killed_for is ExitReason.OUTPUT_EXCEEDED:
            return ExitReason.OUTPUT_EXCEEDED
        if OUT_OF_MEMORY in status:
            return ExitReason.MEMORY_EXCEEDED
        if result["exit_code"] is not None:
            return ExitReason.EXITED  # by itself, even if just before it was to be killed
        if self._killed_for:
            return self._killed_for
        spent = result["cpu_seconds"] / limits.cpu_seconds
        if result["signal"] in _SPENT and spent > _SPENT[result["signal"]]:
            return ExitReason.TIMED_OUT
        return ExitReason.SIGNALLED

    def _hear(self, message: dict[str, Any], descriptors: list[int]) -> None:
        event = message["event"]
        if event == "started":
            self._handle, self._main_handle = descriptors
            self._began = time.perf_counter()
            if self._doomed:
                self.kill(None)
            else:
                self._set_timer(self._job.limits.wall_seconds, self.kill, ExitReason.TIMED_OUT)
                if self._job.limits.processes > 1:  # of one process the kernel limits all
                    self._watching = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._watch)
            return
        if event == "ended" and "cpu_seconds" in message:
            self._result = message
        else:
            self._lost = event == "lost" and not self._problem
            self._problem = self._problem or message.get("reason") or "the fork server has died"
        self._end()

    def _watch(self) -> None:
        """Kill the tree if its processes together use too much."""
        main, first = pid_of(self._main_handle), pid_of(self._handle)
        used = tree_usage([main], first if first != main else 0, self._server.base_bytes)
        limits = self._job.limits
        if used.processes > 1 and used.memory_bytes > limits.memory_bytes - limits.scratch_bytes:
            self.kill(ExitReason.MEMORY_EXCEEDED)
        elif used.cpu_seconds > limits.cpu_seconds:
            self.kill(ExitReason.TIMED_OUT)
        else:
            self._watching = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._watch)

    def _give_up(self, reason: str) -> None:
        """The fork server does not do as it should: end it, and with it all that it started."""
        self._problem = reason
        self._server.kill()

    def _end(self) -> None:
        self._finished = time.perf_counter()
        self._server.forget(self._name)
        self._close_streams()
        for handle in (self._handle, self._main_handle):
            if handle >= 0:
                os.close(handle)
        self.ended.set()

    def _close_streams(self) -> None:
        for timer in (self._timer, self._watching):
            if timer:
                timer.cancel()
        for stream in self._streams:
            stream.read()  # what the dead have left behind
            self.survived |= stream.open
            stream.close()

    def _stream(self, most: int, overflow: Callable[[], None] | None) -> _Stream:
        stream = _Stream(most, overflow)
        self._streams.append(stream)
        return stream

    def _set_timer(self, seconds: float, action: Callable, *arguments: object) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action, *arguments)


def sealed(data: bytes) -> int:
    """Return a descriptor to read `data` from: memory that no program can change."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor
