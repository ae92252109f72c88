"""The fork server: one process that runs nothing of anyone's, and forks one that does for each job.

It holds no secret: started with an empty environment, it gets of each job only numbers and descriptors, which it closes
after the fork. It tells of every job that it started (with two pidfds: the process to kill, the program's first
process) and, when its whole process tree is gone, how its first process ended.
"""

import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox import child, messages
from quartet_reward.sandbox.confine import PAIR, PAYLOAD, REPORT, STATUS, Allowance
from quartet_reward.sandbox.process_trees import ProcessTree, ProcessTrees
from quartet_reward.sandbox.syscalls import WAIT_ALL

_STREAMS = {"payload": PAYLOAD, "stdin": 0, "stdout": 1, "stderr": 2, "status": STATUS, "pair": PAIR, "report": REPORT}
Entries = dict[str, Callable[[bytes], None]]


class ForkServer:
    """Serves one channel until it closes."""

    def __init__(self, channel: socket.socket, trees: ProcessTrees, entries: Entries):
        self._channel = channel
        self._trees = trees
        self._entries = entries
        self._poll = select.poll()
        self._main: dict[int, tuple[int, ProcessTree]] = {}
        self._last: dict[int, tuple[int, ProcessTree, dict[str, Any]]] = {}

    @property
    def trees(self) -> list[ProcessTree]:
        """What runs now."""
        return [tree for _, tree in self._main.values()]

    def serve(self) -> None:
        """Fork and reap until the service closes its end; then kill what runs, and end when it is gone."""
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
                        message, descriptors = messages.receive(self._channel)
                    except messages.Closed:
                        open_ = False
                        self._poll.unregister(self._channel)
                        for tree in self.trees:
                            signal.pidfd_send_signal(tree.kill_handle, signal.SIGKILL)
                        continue
                    self._start(message, descriptors)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        job = message["job"]
        entry = self._entries[message["entry"]]
        streams = {_STREAMS[name]: number for name, number in zip(message["streams"], descriptors, strict=True)}
        try:
            tree = self._trees.start(
                message["uid"], Allowance(**message["allowance"]), streams, lambda confine: child.run(confine, entry)
            )
        except OSError as error:
            messages.send(self._channel, {"job": job, "event": "failed", "reason": str(error)})
            return
        finally:
            messages.close_all(descriptors)
        self._main[tree.main_handle] = job, tree
        self._poll.register(tree.main_handle, select.POLLIN)
        messages.send(self._channel, {"job": job, "event": "started"}, [tree.kill_handle, tree.main_handle])

    def _main_ended(self, handle: int) -> None:
        job, tree = self._main.pop(handle)
        _, status, usage = os.wait4(tree.main, WAIT_ALL)
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
                "peak_memory_bytes": usage.ru_maxrss * 1024,
            },
        )

    def _tree_ended(self, handle: int) -> None:
        job, tree, result = self._last.pop(handle)
        gone = self._trees.reap(tree)
        self._close(handle)
        event = {"event": "ended", **result} if gone else {"event": "failed", "reason": "its processes do not die"}
        messages.send(self._channel, {"job": job, **event})

    def _close(self, handle: int) -> None:
        self._poll.unregister(handle)
        os.close(handle)


def ignore_signals() -> None:
    """Let the kernel reap stray children, and end at SIGINT without a word."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
