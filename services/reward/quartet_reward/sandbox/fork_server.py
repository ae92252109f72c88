"""The fork server: one process that runs nothing of anyone's, and forks one that does for each job.

It holds no secret: started with an empty environment, it gets of each job only numbers and descriptors, which it closes
after the fork. A job's process tree lives in a pid namespace whose first process does nothing but wait for its end (and
let the kernel reap orphans); when it is killed, the kernel kills the whole tree, and it is gone only when the tree is.
"""

import ctypes
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quartet_reward.sandbox import child, messages
from quartet_reward.sandbox.confine import PAIR, PAYLOAD, REPORT, STATUS, Allowance, Confinement
from quartet_reward.sandbox.syscalls import (
    CLONE_PIDFD,
    CLONE_VM,
    LIBC,
    NEWIPC,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NUMBERS,
    WAIT_ALL,
    call,
    check,
)

_INIT_STACK_BYTES = 16384
_STREAMS = {"payload": PAYLOAD, "stdin": 0, "stdout": 1, "stderr": 2, "status": STATUS, "pair": PAIR, "report": REPORT}


@dataclass
class Running:
    """A job under way."""

    name: int
    init: int
    init_handle: int
    stack: ctypes.Array
    main: int
    main_handle: int
    ended: dict[str, Any] | None = None


class ForkServer:
    """Serves one channel until it closes."""

    def __init__(
        self,
        channel: socket.socket,
        confinement: Confinement,
        entries: dict[str, Callable[[bytes], None]],
        own_pids: int,
    ):
        self._channel = channel
        self._confinement = confinement
        self._entries = entries
        self._poll = select.poll()
        self._handles: dict[int, Running] = {}
        self._stacks: list[ctypes.Array] = []
        self._own_pids = own_pids
        self._pause = ctypes.cast(LIBC.pause, ctypes.c_void_p)
        self._handle = ctypes.c_int()

    def serve(self) -> None:
        """Fork and reap until the service closes its end."""
        self._poll.register(self._channel, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._channel.fileno():
                    self._reap(descriptor)
                    continue
                try:
                    message, descriptors = messages.receive(self._channel)
                except messages.Closed:
                    return
                self._start(message, descriptors)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            job = self._fork(message, dict(zip(message["streams"], descriptors, strict=True)))
        except OSError as error:
            messages.send(self._channel, {"job": message["job"], "event": "failed", "reason": str(error)})
            return
        finally:
            messages.close_all(descriptors)
        for handle in (job.init_handle, job.main_handle):
            self._handles[handle] = job
            self._poll.register(handle, select.POLLIN)
        messages.send(self._channel, {"job": job.name, "event": "started"}, [job.init_handle])

    def _fork(self, message: dict[str, Any], streams: dict[str, int]) -> Running:
        uid, allowance = message["uid"], Allowance(**message["allowance"])
        entry = self._entries[message["entry"]]
        wanted = {_STREAMS[name]: descriptor for name, descriptor in streams.items()}
        call("unshare", NEWPID)
        init = -1
        try:
            stack = self._stacks.pop() if self._stacks else ctypes.create_string_buffer(_INIT_STACK_BYTES)
            init, init_handle = self._clone_init(stack)
            # Under the slot's own user, so that the child's user namespace is of that user.
            if uid:
                os.setresuid(-1, uid, -1)
            ctypes.pythonapi.PyOS_BeforeFork()
            main = LIBC.syscall(
                ctypes.c_long(NUMBERS["clone"]),
                ctypes.c_long(NEWUSER | NEWNS | NEWIPC | NEWUTS | CLONE_PIDFD),
                None,
                ctypes.byref(self._handle),
                None,
                None,
            )
            if main == 0:
                ctypes.pythonapi.PyOS_AfterFork_Child()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                child.run(lambda: self._confinement.enter(allowance, wanted, uid), entry)
            number = ctypes.get_errno()
            ctypes.pythonapi.PyOS_AfterFork_Parent()
            if uid:
                os.setresuid(-1, 0, -1)
            if main < 0:
                raise OSError(number, f"clone: {os.strerror(number)}")
        except OSError:
            if init > 0:
                os.kill(init, signal.SIGKILL)
                os.waitpid(init, WAIT_ALL)
                os.close(init_handle)
            raise
        finally:
            check(LIBC.setns(self._own_pids, NEWPID), "setns")
        return Running(message["job"], init, init_handle, stack, main, self._handle.value)

    def _clone_init(self, stack: ctypes.Array) -> tuple[int, int]:
        """Start the new pid namespace's first process: libc's pause() in this memory, on a stack of its own.

        It shares this process's pages, so it costs next to nothing; it ignores SIGCHLD as this process does, so the
        kernel reaps the orphans it inherits.
        """
        top = (ctypes.addressof(stack) + _INIT_STACK_BYTES) & ~15
        flags = CLONE_VM | CLONE_PIDFD
        init = LIBC.clone(self._pause, ctypes.c_void_p(top), flags, None, ctypes.byref(self._handle), None, None)
        return check(init, "clone of the first process"), self._handle.value

    def _reap(self, handle: int) -> None:
        job = self._handles.pop(handle)
        self._poll.unregister(handle)
        if handle == job.main_handle:
            _, status, usage = os.wait4(job.main, WAIT_ALL)
            job.ended = {
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_memory_bytes": usage.ru_maxrss * 1024,
            }
            signal.pidfd_send_signal(job.init_handle, signal.SIGKILL)
        else:
            os.waitpid(job.init, WAIT_ALL)
            self._stacks.append(job.stack)
            messages.send(self._channel, {"job": job.name, "event": "ended", **(job.ended or {})})
        os.close(handle)
