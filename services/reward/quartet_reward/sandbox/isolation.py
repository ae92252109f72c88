"""The fork server's own fences: where it can, it lives in namespaces of its own, and its children in others inside."""

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox import landlock, messages, root
from quartet_reward.sandbox.confine import USER, Confinement, limit_all
from quartet_reward.sandbox.fork_server import Entries, ForkServer, ignore_signals
from quartet_reward.sandbox.syscalls import (
    LIBC,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NUMBERS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    call,
    check,
    prctl,
)
from quartet_reward.sandbox.trees import Forest, NamespaceForest, UserForest

ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "sandbox"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads count against the limit of processes
"""All that a program finds in its environment."""
_ARENAS, _M_ARENA_MAX = 2, -8


def start(channel: socket.socket, entries: Entries, settings: dict[str, Any]) -> int:
    """Be a fork server, or the parent of one; return its status when it has ended. Raises OSError."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    first_uid, uids, way = settings["first_uid"], settings["uids"], settings["way"]
    if os.geteuid() == 0:
        os.setgroups([])
    if way == "users":
        serve_users(channel, entries, proc, settings)
        return 0
    if way == "namespaces" and first_uid:
        # Not root any more, or the kernel would not count processes against a limit.
        os.setresgid(first_uid, first_uid, first_uid)
        os.setresuid(first_uid, first_uid, first_uid)
        prctl(PR_SET_DUMPABLE, 1)  # or its children's /proc files would be root's
        first_uid = 0
    if first_uid:
        # Files are shown before root is given up: some lie in folders that only root may enter.
        call("unshare", NEWNS)
        root.build(settings["packages"])
        both = f"0 {first_uid} 1\n{USER + 1} {first_uid + 1} {uids - 1}"
        ids = (both, both)
    else:
        ids = (f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1")
    prepare = (lambda: None) if first_uid else (lambda: root.build(settings["packages"]))
    return in_namespaces(lambda: serve_namespaces(channel, entries, proc, prepare, bool(first_uid)), ids, proc, channel)


def in_namespaces(serve: Callable[[], None], ids: tuple[str, str], proc: int, channel: socket.socket) -> int:
    """Fork a process into new namespaces, with these uid and gid maps, and wait for its end. Raises OSError."""
    mapped, tell_mapped = os.pipe()
    flags = NEWUSER | NEWPID | NEWNS | NEWNET | NEWIPC | NEWUTS | signal.SIGCHLD
    pid = check(LIBC.syscall(ctypes.c_long(NUMBERS["clone"]), ctypes.c_long(flags), None, None, None, None), "clone")
    if pid == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(tell_mapped)
            if os.read(mapped, 1) == b"1":
                os.close(mapped)
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                prctl(PR_SET_DUMPABLE, 1)  # until all of /proc/self that is needed has been written
                serve()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            messages.send(channel, {"event": "failed", "reason": reason})
        finally:
            os._exit(0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    for name, text in (("setgroups", "deny"), ("uid_map", ids[0]), ("gid_map", ids[1])):
        with open(os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)
    os.write(tell_mapped, b"1")
    channel.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def serve_namespaces(
    channel: socket.socket, entries: Entries, proc: int, prepare: Callable[[], None], users: bool
) -> None:
    """Be the fork server, the first process of its namespaces."""
    prepare()
    own_pids = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    fences = landlock.Landlock(["/"], ["/dev/null"]) if landlock.version() else None
    serve(channel, entries, proc, NamespaceForest(Confinement(proc, fences, own_bytes(proc)[0]), own_pids, users))


def serve_users(channel: socket.socket, entries: Entries, proc: int, settings: dict[str, Any]) -> None:
    """Be the fork server where there are no namespaces. Raises OSError if Landlock is missing but demanded."""
    fences = None
    if landlock.version() or settings["strict"]:
        fences = landlock.Landlock(root.readable_paths(settings["packages"]), list(root.DEVICES))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process, which ignores SIGCHLD
    confinement = Confinement(proc, fences, own_bytes(proc)[0], settings["first_uid"])
    serve(channel, entries, proc, UserForest(confinement, settings["uids"] if settings["first_uid"] else 0))


def serve(channel: socket.socket, entries: Entries, proc: int, forest: Forest) -> None:
    """Say that all is ready and serve."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), "w") as file:
        file.write("1000")  # when the machine has no memory left, programs go first
    limit_all()
    prctl(PR_SET_DUMPABLE, 0)
    ignore_signals()
    LIBC.mallopt(_M_ARENA_MAX, _ARENAS)
    forest.clear([])
    server = ForkServer(channel, forest, entries)
    messages.send(channel, {"event": "ready", "entries": sorted(entries), "resident_bytes": own_bytes(proc)[1]})
    try:
        server.serve()
    finally:
        forest.clear(server.trees)


def own_bytes(proc: int) -> list[int]:
    """Return this process's address space and resident size: what every child has from the beginning."""
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:2]]
