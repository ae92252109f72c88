"""Starts the fork server and isolates it: in the namespace modes it has its own, and each job more inside them."""

import fcntl
import gc
import importlib
import json
import os
import signal
import site
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox import kernel
from quartet_reward.sandbox.child import USER, Confinement, Landlock, landlock_version, limit_all
from quartet_reward.sandbox.fork_server import (
    Entries,
    ForkServer,
    NamespaceTrees,
    ProcessTrees,
    UserTrees,
    ignore_signals,
    send_message,
)

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_ATTRIBUTES_RDONLY_NOSUID = 3


def python_paths() -> list[str]:
    """Return the files and folders that this interpreter needs, without site-packages."""
    base = os.path.realpath(sys.base_prefix)
    paths = [
        sysconfig.get_path("stdlib", vars={"base": base, "installed_base": base}),
        sysconfig.get_path("platstdlib", vars={"platbase": base, "installed_platbase": base}),
        sysconfig.get_config_var("LIBDIR") or "",
        os.path.realpath(sys.executable),
    ]
    return [path for path in dict.fromkeys(map(os.path.realpath, filter(None, paths))) if os.path.exists(path)]


def readable_paths(extra: list[str]) -> list[str]:
    """Return the paths that programs can read, parents before children, without those that a parent covers."""
    chosen: list[str] = []
    for path in sorted({*python_paths(), *_LIBRARIES, *extra}):
        covered = any(path == other or path.startswith(other + "/") for other in chosen if not os.path.islink(other))
        if os.path.lexists(path) and not covered:
            chosen.append(path)
    return chosen


def build_root(extra: list[str]) -> None:
    """Replace the root of this process's mount namespace by a read-only one. Raises OSError."""
    paths = readable_paths(extra)
    os.umask(0o022)  # programs run as other users
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1k,mode=0755")
    os.mkdir("/tmp/old")
    os.chdir("/tmp")
    kernel.call("pivot_root", b".", b"old")
    os.chdir("/")
    for path in [*paths, *DEVICES]:
        _show(path)
    os.mkdir("/tmp", 0o755)
    kernel.check(kernel.LIBC.umount2(b"/old", kernel.MNT_DETACH), "umount the old root")
    os.rmdir("/old")
    attributes = struct.pack("QQQQ", _ATTRIBUTES_RDONLY_NOSUID, 0, 0, 0)
    kernel.call("mount_setattr", _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))


def _show(path: str) -> None:
    """Bind a file or folder of the old root into the new one."""
    source = "/old" + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)


ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "sandbox"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads count against the limit of processes
"""A program's environment variables."""
_ARENAS, _M_ARENA_MAX = 2, -8


def start(channel: socket.socket, entries: Entries, settings: dict[str, Any]) -> int:
    """Run the fork server, in this process or in a child inside new namespaces; return its status. Raises OSError."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    first_uid, uids, mode = settings["first_uid"], settings["uids"], settings["mode"]
    if os.geteuid() == 0:
        os.setgroups([])
    if mode == "uid+landlock+seccomp":
        serve_users(channel, entries, proc, settings)
        return 0
    if mode == "namespaces" and first_uid:
        # The kernel does not count root's processes against RLIMIT_NPROC.
        os.setresgid(first_uid, first_uid, first_uid)
        os.setresuid(first_uid, first_uid, first_uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or root would own its children's /proc files
        first_uid = 0
    if first_uid:
        # Built before root is given up: some files lie in folders that only root may enter.
        kernel.call("unshare", kernel.NEWNS)
        build_root(settings["packages"])
        both = f"0 {first_uid} 1\n{USER + 1} {first_uid + 1} {uids - 1}"
        ids = (both, both)
    else:
        ids = (f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1")
    return in_namespaces(
        lambda: serve_namespaces(channel, entries, proc, settings, bool(first_uid)), ids, proc, channel
    )


def in_namespaces(serve: Callable[[], None], ids: tuple[str, str], proc: int, channel: socket.socket) -> int:
    """Fork a process into new namespaces with these uid and gid maps, and wait for its end. Raises OSError."""
    read_mapped, write_mapped = os.pipe()
    flags = (kernel.ALL_NEW & ~kernel.NEWCGROUP) | signal.SIGCHLD
    pid = kernel.call("clone", flags, None, None, None, None)
    if pid == 0:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(write_mapped)
            if os.read(read_mapped, 1) == b"1":
                os.close(read_mapped)
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # for writing to /proc/self, until `serve` is done with it
                serve()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            send_message(channel, {"event": "failed", "reason": reason})
        finally:
            os._exit(0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it
    for name, text in (("setgroups", "deny"), ("uid_map", ids[0]), ("gid_map", ids[1])):
        with open(os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)
    os.write(write_mapped, b"1")
    channel.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def serve_namespaces(
    channel: socket.socket, entries: Entries, proc: int, settings: dict[str, Any], users: bool
) -> None:
    """Run the fork server as the first process of its namespaces. `users`: slots have users, the root is built."""
    if not users:
        build_root(settings["packages"])
    own_pids = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    fences = Landlock(["/"], ["/dev/null"]) if landlock_version() else None
    serve(channel, entries, proc, NamespaceTrees(Confinement(proc, fences, own_bytes(proc)[0]), own_pids, users))


def serve_users(channel: socket.socket, entries: Entries, proc: int, settings: dict[str, Any]) -> None:
    """Run the fork server without namespaces. Raises OSError if the kernel has no Landlock."""
    fences = Landlock(readable_paths(settings["packages"]), list(DEVICES))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process, which ignores SIGCHLD
    confinement = Confinement(proc, fences, own_bytes(proc)[0], settings["first_uid"])
    serve(channel, entries, proc, UserTrees(confinement, settings["uids"]))


def serve(channel: socket.socket, entries: Entries, proc: int, trees: ProcessTrees) -> None:
    """Limit this process, send "ready" and serve jobs."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), "w") as file:
        file.write("1000")  # the OOM killer shall choose programs first
    limit_all()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    ignore_signals()
    kernel.LIBC.mallopt(_M_ARENA_MAX, _ARENAS)
    trees.clear()
    send_message(channel, {"event": "ready", "resident_bytes": own_bytes(proc)[1]})
    try:
        ForkServer(channel, trees, entries).serve()
    finally:
        trees.clear()


def own_bytes(proc: int) -> list[int]:
    """Return this process's address space and resident size, which every child inherits."""
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:2]]


_RESERVED = 10


def main() -> int:
    """Preload the modules and run a fork server; return its status.

    Arguments: FOLDER (of the package), CHANNEL (descriptor of a socket to the service), SETTINGS (JSON). In the
    namespace modes this process stays outside, as the fork server's parent: when one dies, so does the other.
    """
    folder, settings = sys.argv[1], json.loads(sys.argv[3])
    channel = socket.socket(fileno=fcntl.fcntl(int(sys.argv[2]), fcntl.F_DUPFD_CLOEXEC, _RESERVED))
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["parent"]:
            return 1
        reserve_descriptors()
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        site.setquit()  # `exit` and `quit`, which -S leaves out
        for name in settings["preload"]:
            importlib.import_module(name)
        entries = {name: importlib.import_module(module).main for name, module in settings["entries"].items()}
        importlib.import_module(settings["rehearsal"]).rehearse()
        sys.path[:] = [path for path in sys.path if path != folder] + settings["packages"]
        gc.collect()
        gc.freeze()
        return start(channel, entries, settings)
    except Exception as error:
        send_message(channel, {"event": "failed", "reason": f"{type(error).__name__}: {error}"})
        return 1


def reserve_descriptors() -> None:
    """Occupy the descriptor numbers that programs use, so that no other descriptor gets one of them."""
    os.closerange(3, _RESERVED)
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < _RESERVED - 1:
        descriptor = os.dup(descriptor)
