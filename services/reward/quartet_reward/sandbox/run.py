"""One running job, in the service's process: its pipes, its timers and its result."""

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from quartet_reward.sandbox.api import LATE, Execution, ExitReason, Job, KilledFromOutside, SandboxUnavailable
from quartet_reward.sandbox.child import OUT_OF_MEMORY, READY
from quartet_reward.sandbox.fork_server import close_all
from quartet_reward.sandbox.server_handle import ServerHandle

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_READ = 1 << 20  # at one time, before others have their turn on the event loop
_LEAST_SECONDS = 0.05  # of wall time, when it is extended
_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 4096
INTERVAL_SECONDS = 0.1
_PF_EXITING = 4

_CHUNK = 65536
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# A killed tree is gone in milliseconds, later only on a machine that swaps.
_DEATH_SECONDS = 10.0
_START_SECONDS = 10.0
_STATUS_BYTES = 4096
# Share of its CPU limit that a program must have used for a signal to count as the kernel's. The kernel sends SIGXCPU
# at the limit and SIGKILL a second later, by a clock that counts ticks; on a busy machine the CPU time that it reported
# at the end was 25% less. SIGKILL may also come from outside, SIGXCPU from the program itself.
_SPENT = {signal.SIGXCPU: 0.5, signal.SIGKILL: 0.8}


@dataclass(frozen=True)
class Usage:
    """What a process tree uses now."""

    processes: int
    memory_bytes: int
    """Resident memory, without the pages shared with the fork server."""
    cpu_seconds: float
    waited_seconds: float
    """How long the thread that waited most was ready to run and no processor was free."""


def pid_of(handle: int) -> int:
    """Return the process id of a pidfd, 0 if the process has ended."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pid:"):
                    return max(0, int(line[4:]))
    except OSError:
        return 0
    return 0


def tree_usage(roots: list[int], idle: int, base_bytes: int) -> Usage:
    """Return the usage of `roots` and all their descendants.

    `idle` (0: none): a namespace's init process; its descendants count, it does not. `base_bytes`: the memory that each
    process shares with the fork server. Processes that end meanwhile are left out.
    """
    seen: set[int] = set()
    waiting = [*roots, idle] if idle else list(roots)
    memory, seconds, waited = 0, 0.0, 0.0
    while waiting and len(seen) < _MOST_PROCESSES:
        pid = waiting.pop()
        if pid in seen or pid <= 0:
            continue
        seen.add(pid)
        try:
            waiting += _children(pid)
            if pid != idle:
                waited = max(waited, *_waits(pid))
                with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                    memory += max(0, int(file.read().split()[1]) * _PAGE - base_bytes)
                seconds += sum(map(int, _stat(str(pid))[11:15])) / _TICKS
        except OSError:  # it has ended, or this process is out of file descriptors
            continue
    return Usage(len(seen) - (1 if idle in seen else 0), memory, seconds, waited)


def has_threads(handle: int) -> bool:
    """Return whether a pidfd's process has a thread that has not begun to exit; False if it cannot be read."""
    pid = pid_of(handle)
    # The process may be reaped meanwhile, or the service be out of file descriptors: neither may prevent a kill.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not int(_stat(f"{pid}/task/{thread}")[6]) & _PF_EXITING:
                    return True
    return False


def _stat(task: str) -> list[str]:
    """Return the fields of a process's or thread's `stat`, from the state on."""
    with open(f"/proc/{task}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def _waits(pid: int) -> list[float]:
    """Return the seconds that each thread of a process was ready and waited; 0 if the kernel does not count them."""
    found = [0.0]
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            found.append(int(file.read().split()[1]) / 1e9)
    return found


class _Stream:
    """The service's end of a pipe that a program writes to."""

    def __init__(self, most: int, overflow: Callable[[], None] | None, on_data: Callable[[], None] | None = None):
        """Open a pipe.

        Args:
            most: bytes that are read.
            overflow: called at the first byte beyond; if it is None, the pipe is read only at the end.
            on_data: called when the program has written.
        """
        self._most = most
        self._on_data = on_data
        self._overflow = overflow
        self.data = bytearray()
        self._own, self.theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.theirs, True)
        if overflow:
            asyncio.get_running_loop().add_reader(self._own, self.read)
        self.open = True

    def read(self, most: int = _MOST_READ) -> None:
        while self.open and most > 0:
            try:
                chunk = os.read(self._own, _CHUNK)
            except BlockingIOError:
                break
            most -= len(chunk)
            self.data += chunk
            if not chunk:
                self.close()
            elif len(self.data) > self._most:
                del self.data[self._most :]
                self.close()
                if self._overflow:
                    self._overflow()
        if self._on_data:
            self._on_data()

    def close(self) -> None:
        if self.open:
            self.open = False
            if self._overflow:
                asyncio.get_running_loop().remove_reader(self._own)
            os.close(self._own)


Inputs = dict[str, int]


class JobRun:
    """A job that starts at once; `ended` is set when its process tree is gone."""

    def __init__(
        self,
        server: ServerHandle,
        slot: int,
        job: Job,
        inputs: Inputs,
        pair: int | None = None,
    ):
        """Start the job.

        Args:
            inputs: what `seal_inputs` has made of the job; this closes them.
            pair: descriptor of a socket for the program; the caller closes its copy.

        Raises:
            SandboxUnavailable: the job could not be started.
        """
        self._server, self._job = server, job
        self._killed_for: ExitReason | None = None
        self._kill_requested = False
        self._killed = False
        self._lost = False
        self._problem = ""
        self._result: dict[str, Any] = {}
        self._handle = self._main_handle = -1
        self._began = self._finished = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._waited = 0.0
        self._reported = 0
        self.beside: JobRun | None = None
        """The other job of a judged execution."""
        self.ended = asyncio.Event()
        self.survived = False
        """Whether a process still held a pipe of the program after the process tree was gone."""
        self._streams: dict[str, _Stream] = {}
        passed = dict(inputs)
        try:
            for name in ("stdout", "stderr", "report") if job.reports else ("stdout", "stderr"):
                on_data = self._on_report if name == "report" else None
                stream = _Stream(job.limits.output_bytes, lambda: self.kill(ExitReason.OUTPUT_EXCEEDED), on_data)
                self._streams[name], passed[name] = stream, stream.theirs
            self._streams["status"] = _Stream(_STATUS_BYTES, None)
            passed["status"] = self._streams["status"].theirs
            streams = passed if pair is None else {**passed, "pair": pair}
            message = {"entry": job.entry, "streams": list(streams), "limits": asdict(job.limits)}
            self._name = server.send(slot, message, list(streams.values()), self._on_message)
        except SandboxUnavailable:
            self._close_streams()
            raise
        except OSError as error:
            self._close_streams()
            raise SandboxUnavailable(f"the service could not start a program: {error}") from error
        finally:
            for descriptor in passed.values():
                os.close(descriptor)
        self._timer = asyncio.get_running_loop().call_later(_START_SECONDS, self._give_up, "it did not begin")

    def kill(self, reason: ExitReason | None) -> None:
        """Kill the process tree. `reason` is the ending to report; the first one given counts."""
        if self.ended.is_set():
            return
        if reason is ExitReason.TIMED_OUT and not self._kill_requested and self._is_stopped():
            self._lost, self._problem = True, "something outside the sandbox stopped the program"
        self._killed_for = self._killed_for or reason
        self._kill_requested = True
        if self._handle < 0:
            return
        self._killed = self._killed or has_threads(self._main_handle)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._set_timer(_DEATH_SECONDS, self._give_up, "its process tree did not die")

    def _is_stopped(self) -> bool:
        """Return whether a process of the tree is stopped. No program can stop a process (`seccomp`)."""
        waiting = [pid_of(self._main_handle)] if self._handle >= 0 else []
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):  # it has ended
                if _stat(str(pid))[0] == "T":
                    return True
                waiting += _children(pid)
        return False

    def execution(self) -> Execution:
        """Return the result, once `ended` is set. Raises KilledFromOutside, SandboxUnavailable."""
        if self._lost:
            raise KilledFromOutside(self._problem)
        status = self._read("status")
        foreign = self._result.get("signal") == signal.SIGKILL and not self._killed
        if foreign and self._ending(status) is ExitReason.SIGNALLED:
            raise KilledFromOutside("something outside the sandbox killed the program, perhaps the kernel's OOM killer")
        unneeded = self._kill_requested and not (self._killed_for or status)  # it was killed before it began
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
            stdout=self._output("stdout"),
            stderr=self._output("stderr"),
            report=self._read("report") if self._job.reports else b"",
            cpu_seconds=result["cpu_seconds"],
            wall_seconds=self._finished - self._began,
            waited_seconds=self._waited,
        )

    def _ending(self, status: bytes) -> ExitReason:
        limits, result = self._job.limits, self._result
        if self._killed_for is ExitReason.OUTPUT_EXCEEDED:
            return ExitReason.OUTPUT_EXCEEDED
        if OUT_OF_MEMORY in status:
            return ExitReason.MEMORY_EXCEEDED
        if result["exit_code"] is not None:
            return ExitReason.EXITED  # by itself, even if a kill followed
        if self._killed_for:
            return self._killed_for
        spent = result["cpu_seconds"] / limits.cpu_seconds
        if result["signal"] in _SPENT and spent > _SPENT[result["signal"]]:
            return ExitReason.TIMED_OUT
        return ExitReason.SIGNALLED

    def _on_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        event = message["event"]
        if event == "started":
            self._handle, self._main_handle = descriptors
            self._began = time.perf_counter()
            if self._kill_requested:
                self.kill(None)
            else:
                self._set_timer(self._job.limits.wall_seconds, self._check_wall_time)
                if self._job.limits.processes > 1:  # the kernel's limits are for each process
                    self._watching = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._watch)
            return
        if event == "ended" and "cpu_seconds" in message:
            self._result = message
        else:
            self._lost = self._lost or event == "lost"
            self._problem = self._problem or message.get("reason") or "the fork server has died"
        self._end()

    def _watch(self) -> None:
        """Kill the tree if its processes together exceed the limits."""
        used, limits = self._measure(), self._job.limits
        if used.processes > 1 and used.memory_bytes > limits.memory_bytes - limits.scratch_bytes:
            self.kill(ExitReason.MEMORY_EXCEEDED)
        elif used.cpu_seconds > limits.cpu_seconds:
            self.kill(ExitReason.TIMED_OUT)
        else:
            self._watching = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._watch)

    def _measure(self) -> Usage:
        main, first = pid_of(self._main_handle), pid_of(self._handle)
        used = tree_usage([main], first if first != main else 0, self._server.base_bytes)
        self._waited = max(self._waited, used.waited_seconds)
        return used

    def _check_wall_time(self) -> None:
        """Kill the tree if its wall time is over, without that in which it, or the job beside it, had no processor."""
        limits = self._job.limits
        wall = time.perf_counter() - self._began
        waits = self._waits() + (self.beside._waits() if self.beside else 0.0)
        left = limits.wall_seconds + waits - wall
        if limits.patience <= 1 or left < _LEAST_SECONDS:
            self.kill(ExitReason.TIMED_OUT)
        elif wall < limits.patience * limits.wall_seconds:
            self._set_timer(
                min(left, limits.patience * limits.wall_seconds - wall + _LEAST_SECONDS), self._check_wall_time
            )
        else:
            self._problem = (
                f"this machine is too busy: in {wall:.1f} s a program of at most {limits.wall_seconds:.1f} s waited "
                f"{waits:.1f} s for a processor"
            )
            self.kill(None)

    def _waits(self) -> float:
        """Return how long the job has waited for a processor; the last watch may be long ago on a busy machine."""
        if not self.ended.is_set():
            self._measure()
        return self._waited

    def _on_report(self) -> None:
        """Judge how long the program beside this judge takes, when the judge asks."""
        data = self._streams["report"].data
        end = data.rfind(b"\n") + 1
        lines, self._reported = bytes(data[self._reported : end]).splitlines(), max(end, self._reported)
        for line in lines:
            if self.beside and line.startswith(LATE):
                waited, allowed = map(float, line[len(LATE) :].split())
                if waited - self.beside._waits() > allowed - _LEAST_SECONDS:
                    self.beside.kill(ExitReason.TIMED_OUT)

    def _give_up(self, reason: str) -> None:
        """Kill the fork server, which does not respond, and with it all its jobs."""
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
        for stream in self._streams.values():
            stream.read(self._job.limits.output_bytes + _MOST_READ)  # what is left in the pipe
            self.survived |= stream.open
            stream.close()

    def _read(self, name: str) -> bytes:
        return bytes(self._streams[name].data)

    def _output(self, name: str) -> bytes | bytearray:
        data = self._streams[name].data
        return bytes(data) if len(data) <= _MOST_READ else data

    def _set_timer(self, seconds: float, action: Callable, *arguments: object) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action, *arguments)


async def seal_inputs(job: Job) -> Inputs:
    """Return the descriptors of a job's payload and input, as sealed memory files.

    Large ones are written in a thread: writing 64 MiB takes tens of milliseconds.

    Raises:
        SandboxUnavailable: this process has no descriptors left, or no memory.
    """
    try:
        if len(job.payload) + len(job.stdin) <= _MOST_READ:
            return _sealed_inputs(job)
        writing = asyncio.get_running_loop().run_in_executor(None, _sealed_inputs, job)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_close_inputs)
            raise
    except OSError as error:
        raise SandboxUnavailable(f"the service could not start a program: {error}") from error


def _close_inputs(written: asyncio.Future[Inputs]) -> None:
    if not written.exception():
        close_all(list(written.result().values()))


def _sealed_inputs(job: Job) -> Inputs:
    inputs = {"payload": sealed(job.payload)}
    if job.stdin:
        try:
            inputs["stdin"] = sealed(job.stdin)
        except OSError:
            os.close(inputs["payload"])
            raise
    return inputs


def sealed(data: bytes | bytearray) -> int:
    """Return the descriptor of a sealed memory file with `data`, which no program can change."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor
