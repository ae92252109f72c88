"""The fork server: forks a process for each job, and runs no untrusted code itself.

It holds no secret: its environment is empty, and of each job it gets only limits and descriptors, which it closes after
the fork. It sends two messages per job: "started", with two pidfds (the process to kill, the program's first process),
and "ended", when the whole process tree is gone, with the first process's exit status.
"""

import array
import contextlib
import ctypes
import json
import os
import random
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quartet_reward.sandbox import kernel
from quartet_reward.sandbox.api import KilledFromOutside, Limits
from quartet_reward.sandbox.child import PAIR, PAYLOAD, REPORT, STATUS, Confinement, run_child

_MOST_BYTES = 65536
_MOST_DESCRIPTORS = 16


class ChannelClosed(Exception):
    """The other side has closed the channel."""


def send_message(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message. Raises OSError (BlockingIOError if the channel is non-blocking and full)."""
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([json.dumps(message).encode()], attached)


def receive_message(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which are closed on exec.

    Raises:
        ChannelClosed: the other side has closed the channel.
        BlockingIOError: there is no message, and the channel is non-blocking.
    """
    try:
        data, attached, _, _ = channel.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
    except ConnectionError as error:
        raise ChannelClosed from error
    descriptors = array.array("i")
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % 4])
    if not data:
        raise ChannelClosed
    return json.loads(data), list(descriptors)


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_INIT_STACK_BYTES = 16384
_SWEEP_SECONDS = 8.0
_DEATH_MILLISECONDS = 100

Entry = Callable[[bytes], None]
"""What the new process runs, with its payload."""


@dataclass
class ProcessTree:
    """A process and its descendants. The handles are pidfds."""

    main: int
    main_handle: int
    kill_handle: int
    """Killing this process kills the tree, directly or by way of the fork server."""
    last: int = 0
    """After `kill`: the process whose end means that the tree is gone."""
    last_handle: int = -1
    stack: ctypes.Array | None = None
    uid: int = 0


class _Fork:
    """os.fork with flags for clone, a pidfd, and no SIGCHLD at the child's end.

    The fork server ignores SIGCHLD, so that the kernel reaps orphans; it could not wait for a child that ends with it.
    """

    def __init__(self, flags: int):
        self._handle = ctypes.c_int()
        flags |= kernel.CLONE_PIDFD
        self._arguments = (ctypes.c_long(flags), None, ctypes.byref(self._handle), None, None)
        self._number = ctypes.c_long(kernel.NUMBERS["clone"])

    def __call__(self) -> tuple[int, int]:
        """Return the child's pid and pidfd; in the child, with the default SIGCHLD, 0 and -1. Raises OSError."""
        # Python's fork hooks are skipped: they reset locks of other threads, of which there are none, and would cost a
        # third of the fork. Only `random` must be reseeded.
        pid = kernel.check(kernel.LIBC.syscall(self._number, *self._arguments), "clone")
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            random.seed()
            return 0, -1
        return pid, self._handle.value


class NamespaceTrees:
    """Each tree has its own namespaces; the kernel kills it with the init process of its pid namespace."""

    def __init__(self, confinement: Confinement, own_pids: int, users: bool):
        """`own_pids`: a descriptor of this process's pid namespace. `users`: each slot has its own user."""
        self._confinement = confinement
        self._own_pids = own_pids
        self._stacks: list[ctypes.Array] = []
        self._pause = ctypes.cast(kernel.LIBC.pause, ctypes.c_void_p)
        self._handle = ctypes.c_int()
        self._fork = _Fork(kernel.NEWNS if users else kernel.NEWNS | kernel.NEWUSER)

    def start(self, uid: int, limits: Limits, streams: dict[int, int], entry: Entry) -> ProcessTree:
        """Start a process as the second one of a new pid namespace. Raises OSError, KilledFromOutside."""
        kernel.call("unshare", kernel.NEWPID)
        try:
            tree = self._clone_init()
            try:
                main, main_handle = self._fork()
                if main == 0:
                    run_child(lambda: self._confinement.enter(limits, streams, uid), entry)
            except OSError as error:
                poll = select.poll()
                poll.register(tree.last_handle, select.POLLIN)
                init_ended = bool(poll.poll(_DEATH_MILLISECONDS))
                self.kill(tree)
                self.reap(tree)
                os.close(tree.last_handle)
                if init_ended:  # then the kernel refuses to fork into its pid namespace
                    raise KilledFromOutside("something outside the sandbox killed a program before it began") from error
                raise
        finally:
            kernel.check(kernel.LIBC.setns(self._own_pids, kernel.NEWPID), "setns")
        tree.main, tree.main_handle = main, main_handle
        return tree

    def kill(self, tree: ProcessTree) -> None:
        """Kill the pid namespace's init process: the kernel kills all others."""
        signal.pidfd_send_signal(tree.last_handle, signal.SIGKILL)

    def reap(self, tree: ProcessTree) -> bool:
        os.waitpid(tree.last, kernel.WAIT_ALL)
        if tree.stack is not None:
            self._stacks.append(tree.stack)
        return True

    def clear(self) -> None:
        """Do nothing: all programs end with this process, the init of the pid namespace around theirs."""

    def _clone_init(self) -> ProcessTree:
        """Start the new pid namespace's init process: libc's pause() in this process's memory, on another stack.

        Shared memory makes it cheap. It ignores SIGCHLD as this process does, so the kernel reaps the orphans that
        become its children.
        """
        stack = self._stacks.pop() if self._stacks else ctypes.create_string_buffer(_INIT_STACK_BYTES)
        top = (ctypes.addressof(stack) + _INIT_STACK_BYTES) & ~15
        flags, handle = kernel.CLONE_VM | kernel.CLONE_PIDFD, ctypes.byref(self._handle)
        pid = kernel.LIBC.clone(self._pause, ctypes.c_void_p(top), flags, None, handle, None, None)
        init = kernel.check(pid, "clone of the first process")
        pidfd = self._handle.value
        return ProcessTree(0, -1, kill_handle=pidfd, last=init, last_handle=pidfd, stack=stack)


class UserTrees:
    """Each tree runs as a user that has no other process: kill(-1) as that user kills it."""

    def __init__(self, confinement: Confinement, users: int):
        """`users`: their number, this process's included."""
        self._confinement = confinement
        self._users = users
        self._fork = _Fork(0)

    def start(self, uid: int, limits: Limits, streams: dict[int, int], entry: Entry) -> ProcessTree:
        """Start a process as a slot's user. Raises OSError."""
        main, handle = self._fork()
        if main == 0:
            run_child(lambda: self._confinement.enter_as(limits, streams, uid), entry)
        return ProcessTree(main, handle, kill_handle=os.dup(handle), uid=uid)

    def kill(self, tree: ProcessTree) -> None:
        """Start a process that kills all the user's processes and ends when none is left."""
        os.close(tree.kill_handle)
        tree.last, tree.last_handle = self._fork()
        if tree.last == 0:
            os._exit(_sweep(self._confinement.user(tree.uid)))

    def reap(self, tree: ProcessTree) -> bool:
        return os.waitpid(tree.last, kernel.WAIT_ALL)[1] == 0

    def clear(self) -> None:
        for uid in range(1, self._users):
            sweeper, handle = self._fork()
            if sweeper == 0:
                os._exit(_sweep(self._confinement.user(uid)))
            os.waitpid(sweeper, kernel.WAIT_ALL)
            os.close(handle)


def _sweep(uid: int) -> int:
    """Kill all other processes of a user. Return 0 when none is left, 1 at the deadline."""
    os.setresuid(uid, uid, uid)
    # With a limit of two processes, a fork succeeds only when the user has no other one, zombies included.
    resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
    deadline = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            child = os.fork()
        except BlockingIOError:
            time.sleep(0.001)  # they are not this process's children: it can only poll
            continue
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return 0
    return 1


ProcessTrees = NamespaceTrees | UserTrees

_STREAMS = {"payload": PAYLOAD, "stdin": 0, "stdout": 1, "stderr": 2, "status": STATUS, "pair": PAIR, "report": REPORT}
Entries = dict[str, Entry]


class ForkServer:
    """Serves one channel until it closes."""

    def __init__(self, channel: socket.socket, trees: ProcessTrees, entries: Entries):
        self._channel = channel
        self._trees = trees
        self._entries = entries
        self._poll = select.poll()
        self._main: dict[int, tuple[int, ProcessTree]] = {}
        self._last: dict[int, tuple[int, ProcessTree, dict[str, Any]]] = {}

    def serve(self) -> None:
        """Fork and reap until the service closes its end; then kill all jobs and return when they are gone."""
        self._poll.register(self._channel, select.POLLIN)
        open_ = True
        while open_ or self._main or self._last:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._main:
                    self._main_ended(descriptor)
                elif descriptor in self._last:
                    self._tree_ended(descriptor)
                else:
                    try:
                        message, descriptors = receive_message(self._channel)
                    except ChannelClosed:
                        open_ = False
                        self._poll.unregister(self._channel)
                        for _, tree in self._main.values():
                            signal.pidfd_send_signal(tree.kill_handle, signal.SIGKILL)
                        continue
                    self._start(message, descriptors)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        job = message["job"]
        entry = self._entries[message["entry"]]
        streams = {_STREAMS[name]: number for name, number in zip(message["streams"], descriptors, strict=True)}
        try:
            tree = self._trees.start(message["uid"], Limits(**message["limits"]), streams, entry)
        except OSError as error:
            send_message(self._channel, {"job": job, "event": "failed", "reason": str(error)})
            return
        except KilledFromOutside as error:
            send_message(self._channel, {"job": job, "event": "lost", "reason": str(error)})
            return
        finally:
            close_all(descriptors)
        self._main[tree.main_handle] = job, tree
        self._poll.register(tree.main_handle, select.POLLIN)
        send_message(self._channel, {"job": job, "event": "started"}, [tree.kill_handle, tree.main_handle])

    def _main_ended(self, handle: int) -> None:
        job, tree = self._main.pop(handle)
        _, status, usage = os.wait4(tree.main, kernel.WAIT_ALL)
        self._close(handle)
        self._trees.kill(tree)
        self._poll.register(tree.last_handle, select.POLLIN)
        self._last[tree.last_handle] = (
            job,
            tree,
            {
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
            },
        )

    def _tree_ended(self, handle: int) -> None:
        job, tree, result = self._last.pop(handle)
        gone = self._trees.reap(tree)
        self._close(handle)
        event = {"event": "ended", **result} if gone else {"event": "failed", "reason": "its processes do not die"}
        send_message(self._channel, {"job": job, **event})

    def _close(self, handle: int) -> None:
        self._poll.unregister(handle)
        os.close(handle)


def ignore_signals() -> None:
    """Let the kernel reap orphans, and end at SIGINT without a traceback."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
