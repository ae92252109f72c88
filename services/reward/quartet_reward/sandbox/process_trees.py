"""Two ways to start a process whose whole tree can be killed: in a pid namespace, or as a user of its own."""

import ctypes
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quartet_reward.sandbox.confine import Allowance, Confinement
from quartet_reward.sandbox.syscalls import (
    CLONE_PIDFD,
    CLONE_VM,
    LIBC,
    NEWNS,
    NEWPID,
    NEWUSER,
    NUMBERS,
    WAIT_ALL,
    call,
    check,
)

_INIT_STACK_BYTES = 16384
_SWEEP_SECONDS = 8.0

Body = Callable[[Callable[[], None]], None]
"""What the new process does: called with its confinement, it does not return."""


@dataclass
class ProcessTree:
    """A process and all that it starts. The two handles are pidfds."""

    main: int
    main_handle: int
    kill_handle: int
    """Killing this process kills the tree, or makes the fork server kill it."""
    last: int = 0
    """The process whose end means that the tree is gone, once `kill` was called."""
    last_handle: int = -1
    stack: ctypes.Array | None = None
    uid: int = 0


class ProcessTrees(Protocol):
    """Starts process trees, kills and reaps them."""

    def start(self, uid: int, allowance: Allowance, streams: dict[int, int], body: Body) -> ProcessTree:
        """Start a process. Raises OSError."""
        ...

    def kill(self, tree: ProcessTree) -> None:
        """Kill what is left after the main process was reaped; `last_handle` becomes readable when all is gone."""
        ...

    def reap(self, tree: ProcessTree) -> bool:
        """Reap the last process. Return whether the tree is gone."""
        ...

    def clear(self, trees: list[ProcessTree]) -> None:
        """Kill everything there is: `trees`, and what a fork server before this one may have left."""
        ...


class _Fork:
    """os.fork with flags of clone, a pidfd, and no SIGCHLD at the child's end.

    The fork server ignores that signal, so that the kernel reaps strays: it would not see how such a child ended.
    """

    def __init__(self, flags: int):
        self._handle = ctypes.c_int()
        flags |= CLONE_PIDFD
        self._arguments = (ctypes.c_long(flags), None, ctypes.byref(self._handle), None, None)
        self._number = ctypes.c_long(NUMBERS["clone"])

    def __call__(self) -> tuple[int, int]:
        """Return the child's pid and pidfd; in the child, whose SIGCHLD is as usual, 0 and -1. Raises OSError."""
        # Without Python's hooks around a fork, which mend what other threads may have held: there are none here, and
        # the child goes on as the same thread. They cost as much as a third of the fork. Only `random` is to differ.
        pid = check(LIBC.syscall(self._number, *self._arguments), "clone")
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            random.seed()
            return 0, -1
        return pid, self._handle.value


class NamespaceTrees:
    """Each tree in namespaces of its own; the kernel fells it with the first process of its pid namespace."""

    def __init__(self, confinement: Confinement, own_pids: int, users: bool):
        """`own_pids`: a descriptor of the caller's pid namespace. `users`: each slot has a user of its own."""
        self._confinement = confinement
        self._own_pids = own_pids
        self._stacks: list[ctypes.Array] = []
        self._pause = ctypes.cast(LIBC.pause, ctypes.c_void_p)
        self._handle = ctypes.c_int()
        self._fork = _Fork(NEWNS if users else NEWNS | NEWUSER)

    def start(self, uid: int, allowance: Allowance, streams: dict[int, int], body: Body) -> ProcessTree:
        """Start a process as the second of a new pid namespace. Raises OSError."""
        call("unshare", NEWPID)
        try:
            tree = self._clone_init()
            try:
                main, main_handle = self._fork()
                if main == 0:
                    body(lambda: self._confinement.enter(allowance, streams, uid))
            except OSError:
                self.kill(tree)
                self.reap(tree)
                os.close(tree.last_handle)
                raise
        finally:
            check(LIBC.setns(self._own_pids, NEWPID), "setns")
        tree.main, tree.main_handle = main, main_handle
        return tree

    def kill(self, tree: ProcessTree) -> None:
        """Kill the pid namespace's first process: the kernel kills all others."""
        signal.pidfd_send_signal(tree.last_handle, signal.SIGKILL)

    def reap(self, tree: ProcessTree) -> bool:
        """Reap the first process, which ends after all others."""
        os.waitpid(tree.last, WAIT_ALL)
        if tree.stack is not None:
            self._stacks.append(tree.stack)
        return True

    def clear(self, trees: list[ProcessTree]) -> None:
        """Nothing to do: this process is the first of its own pid namespace, and all end with it."""

    def _clone_init(self) -> ProcessTree:
        """Start the new pid namespace's first process: libc's pause() in this memory, on a stack of its own.

        It shares this process's pages, so it costs next to nothing; it ignores SIGCHLD as this process does, so the
        kernel reaps the orphans that become its children.
        """
        stack = self._stacks.pop() if self._stacks else ctypes.create_string_buffer(_INIT_STACK_BYTES)
        top = (ctypes.addressof(stack) + _INIT_STACK_BYTES) & ~15
        arguments = (ctypes.c_void_p(top), CLONE_VM | CLONE_PIDFD, None, ctypes.byref(self._handle), None, None)
        init = check(LIBC.clone(self._pause, *arguments), "clone of the first process")
        handle = self._handle.value
        return ProcessTree(0, -1, kill_handle=handle, last=init, last_handle=handle, stack=stack)


class UserTrees:
    """Each tree under a user of its own, which has no other process: it is felled by that user's kill(-1)."""

    def __init__(self, confinement: Confinement, users: int):
        """`users`: how many there are; with 0, the process group is killed, which setsid leaves."""
        self._confinement = confinement
        self._users = users
        self._fork = _Fork(0)

    def start(self, uid: int, allowance: Allowance, streams: dict[int, int], body: Body) -> ProcessTree:
        """Start a process under a user. Raises OSError."""
        main, handle = self._fork()
        if main == 0:
            body(lambda: self._confinement.enter_as(allowance, streams, uid if self._users else 0))
        return ProcessTree(main, handle, kill_handle=os.dup(handle), uid=uid)

    def kill(self, tree: ProcessTree) -> None:
        """Start a process that kills everything of the user, and ends when there is nothing left."""
        os.close(tree.kill_handle)
        tree.last, tree.last_handle = self._fork()
        if tree.last == 0:
            os._exit(_sweep(self._confinement.user(tree.uid) if self._users else 0, tree.main))

    def reap(self, tree: ProcessTree) -> bool:
        """Reap that process."""
        return os.waitpid(tree.last, WAIT_ALL)[1] == 0

    def clear(self, trees: list[ProcessTree]) -> None:
        """Kill all processes of all slots' users, or, without users, the process groups of `trees`."""
        targets = [(self._confinement.user(uid), 0) for uid in range(1, self._users)]
        for uid, group in targets or [(0, tree.main) for tree in trees]:
            sweeper, handle = self._fork()
            if sweeper == 0:
                os._exit(_sweep(uid, group))
            os.waitpid(sweeper, WAIT_ALL)
            os.close(handle)


def _sweep(uid: int, group: int) -> int:
    """Kill until there is nothing to kill. Return 0 then, 1 if that takes too long."""
    if uid:
        os.setresuid(uid, uid, uid)
        # This process and one more: a fork succeeds only when the user has no other process, zombies included.
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
    deadline = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(-1 if uid else -group, signal.SIGKILL)
            child = os.fork() if uid else -1
        except ProcessLookupError:
            return 0  # the group is empty
        except BlockingIOError:
            child = -1
        if child == 0:
            os._exit(0)
        if child > 0:
            os.waitpid(child, 0)
            return 0
        time.sleep(0.001)  # the killed take their time, and tell nobody who could be awaited
    return 1
