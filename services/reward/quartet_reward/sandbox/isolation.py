"""The fork server's own fences: it lives in namespaces of its own, and its children in others inside them."""

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox import landlock, root
from quartet_reward.sandbox.confine import Confinement
from quartet_reward.sandbox.fork_server import ForkServer
from quartet_reward.sandbox.syscalls import (
    LIBC,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NUMBERS,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    call,
    check,
    prctl,
)

ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "sandbox"}
"""All that a program finds in its environment."""
_ARENAS, _M_ARENA_MAX = 2, -8


def start(channel: socket.socket, entries: dict[str, Callable], settings: dict[str, Any], _preloaded: list) -> int:
    """Fork the fork server into its namespaces and wait for its end. Raises OSError."""
    first_uid, uids = settings["first_uid"], settings["uids"]
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if first_uid:
        # As root: files are shown before root is given up, or folders that only root may enter could not be.
        os.setgroups([])
        call("unshare", NEWNS)
        root.build(settings["readable"])
    mapped, tell_mapped = os.pipe()
    flags = NEWUSER | NEWPID | NEWNS | NEWNET | NEWIPC | NEWUTS | signal.SIGCHLD
    pid = check(LIBC.syscall(ctypes.c_long(NUMBERS["clone"]), ctypes.c_long(flags), None, None, None, None), "clone")
    if pid == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(tell_mapped)
        if os.read(mapped, 1) != b"1":
            os._exit(1)
        os.close(mapped)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if not first_uid:
            root.build(settings["readable"])
        serve(channel, entries, proc)
        os._exit(0)
    outer = (first_uid, uids, first_uid, 1) if first_uid else (os.geteuid(), 1, os.getegid(), 1)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {outer[0]} {outer[1]}"),
        ("gid_map", f"0 {outer[2]} {outer[3]}"),
    ):
        with open(os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)
    os.write(tell_mapped, b"1")
    channel.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def serve(channel: socket.socket, entries: dict[str, Callable], proc: int) -> None:
    """Be the fork server, the first process of its namespaces."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    LIBC.mallopt(_M_ARENA_MAX, _ARENAS)
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        base_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    fences = landlock.Landlock(["/"], list(root.DEVICES)) if landlock.version() else None
    own_pids = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    server = ForkServer(channel, Confinement(proc, fences, base_bytes), entries, own_pids)
    from quartet_reward.sandbox import messages

    messages.send(channel, {"event": "ready", "entries": sorted(entries), "landlock": landlock.version()})
    server.serve()
