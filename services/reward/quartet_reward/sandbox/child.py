"""A job's new process: confines itself, reads the payload, runs the entry and exits as a Python program does."""

import atexit
import contextlib
import ctypes
import linecache
import math
import os
import resource
import signal
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from quartet_reward.sandbox import kernel
from quartet_reward.sandbox.api import Limits
from quartet_reward.sandbox.seccomp import Filter

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_DEVICE_RIGHTS = (1 << 6) | (1 << 11) | (1 << 9)  # make character devices, block devices, sockets
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
READ = _EXECUTE | _READ_FILE | _READ_DIR
_RULE_PATH_BENEATH = 1


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, 0 if it has none."""
    number = kernel.NUMBERS["landlock_create_ruleset"]
    return max(0, kernel.LIBC.syscall(number, None, ctypes.c_long(0), ctypes.c_long(1)))


class Landlock:
    """Allows reading and executing beneath some folders and everything beneath one; no TCP, no signals to others."""

    def __init__(self, readable: list[str], devices: list[str]):
        """`devices` are readable and writable. Raises OSError if the kernel has no Landlock."""
        self.version = landlock_version()
        if not self.version:
            raise OSError("this kernel has no Landlock")
        handled = (1 << 13) - 1
        handled |= (_REFER if self.version >= 2 else 0) | (_TRUNCATE if self.version >= 3 else 0)
        handled |= _IOCTL_DEV if self.version >= 5 else 0
        network = 3 if self.version >= 4 else 0  # TCP: bind, connect
        scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if self.version >= 6 else 0
        self._attributes = struct.pack("QQQ", handled, network, scope)
        self._size = 24 if self.version >= 6 else 16 if self.version >= 4 else 8
        self._everything = handled & ~_DEVICE_RIGHTS & ~_IOCTL_DEV
        self._rules = [(_path_handle(path), READ if os.path.isdir(path) else READ & ~_READ_DIR) for path in readable]
        self._rules += [(_path_handle(path), _READ_FILE | _WRITE_FILE) for path in devices if os.path.exists(path)]

    def install(self, writable: str | None) -> None:
        """Confine this process. Needs no_new_privs. Raises OSError."""
        ruleset = kernel.call("landlock_create_ruleset", self._attributes, self._size, 0)
        for descriptor, rights in self._rules:
            self._allow(ruleset, descriptor, rights)
        if writable:
            folder = _path_handle(writable)
            self._allow(ruleset, folder, self._everything)
            os.close(folder)
        kernel.call("landlock_restrict_self", ruleset, 0)
        os.close(ruleset)

    def _allow(self, ruleset: int, descriptor: int, rights: int) -> None:
        kernel.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)


def _path_handle(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


USER = 1000
"""The user and group of a program in its namespace; where slots have users, slot N has USER + 1 + N."""
SCRATCH = "/tmp"
PAIR, REPORT, STATUS, PAYLOAD = 3, 4, 5, 6
"""Descriptors of the new process; PAYLOAD is closed before the program runs, STATUS does not survive an exec."""
_CAPABILITY_VERSION = 0x20080522
_BYTES_PER_INODE = 4096
_STACK_BYTES = 64 << 20
_NICE = 5  # or fork bombs would slow the service
_MOST_DESCRIPTORS = 2**31 - 1
_NO_LIMIT = 2**62
_LIMITED = (
    resource.RLIMIT_CPU,
    resource.RLIMIT_AS,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
)


class Confinement:
    """Confines a child. Made once, in the fork server."""

    def __init__(self, proc: int, landlock: Landlock | None, base_bytes: int, first_uid: int = 0):
        """Prepare what all children need.

        `proc`: a descriptor of /proc. `base_bytes`: the fork server's address space, which every child inherits.
        `first_uid`: the fork server's user id, for `enter_as`.
        """
        self._first_uid = first_uid
        self._proc = proc
        self._landlock = landlock
        self._base_bytes = base_bytes
        self._filter = Filter()
        self._most = {kind: _hard_limit(kind) for kind in _LIMITED}
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        none = (ctypes.c_uint32 * 6)()
        self._drop_capabilities = (ctypes.c_long(kernel.NUMBERS["capset"]), header, none)

    def enter(self, limits: Limits, descriptors: dict[int, int], slot_uid: int) -> None:
        """Confine this process, the second of its pid namespace. `descriptors`: wanted number → current number.

        Where slots have users (`slot_uid` > 0) it becomes the slot's; otherwise it maps itself in its user namespace.

        Raises:
            OSError: the confinement is not complete; the program must not run.
        """
        inodes = max(64, limits.scratch_bytes // _BYTES_PER_INODE)
        user = USER + slot_uid
        if not slot_uid:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or root would own the files in /proc/self
            self._write("self/setgroups", "deny")
            self._write("self/uid_map", f"{USER} 0 1")
            self._write("self/gid_map", f"{USER} 0 1")
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        options = f"size={limits.scratch_bytes},nr_inodes={inodes},mode=0700,uid={user},gid={user}"
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
        if slot_uid:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        os.chdir(SCRATCH)
        self._restrict(limits, descriptors, SCRATCH)

    def enter_as(self, limits: Limits, descriptors: dict[int, int], slot_uid: int) -> None:
        """Confine this process as the slot's user, without namespaces. Raises OSError."""
        user = self.user(slot_uid)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        self._restrict(limits, descriptors, None)

    def user(self, slot_uid: int) -> int:
        return self._first_uid + slot_uid

    def _restrict(self, limits: Limits, descriptors: dict[int, int], writable: str | None) -> None:
        if not writable:
            os.chdir("/")
        os.umask(0o077)
        os.setsid()  # the kernel may divide CPU time among sessions: a fork bomb gets the share of one
        os.nice(_NICE)
        _set_descriptors(descriptors)
        self._limit(limits)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self._landlock:
            self._landlock.install(writable)
        os.closerange(PAYLOAD + 1, _MOST_DESCRIPTORS)
        kernel.check(kernel.LIBC.syscall(*self._drop_capabilities), "capset")
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        self._filter.install()

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def _limit(self, limits: Limits) -> None:
        cpu_seconds = math.ceil(limits.cpu_seconds)
        memory = self._base_bytes + limits.memory_bytes - limits.scratch_bytes
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
            (resource.RLIMIT_AS, memory, memory),
            (resource.RLIMIT_NPROC, limits.processes, limits.processes),
            (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
            (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        ):
            most = self._most[kind]
            resource.setrlimit(kind, (min(soft, most), min(hard, most)))


def _set_descriptors(wanted: dict[int, int]) -> None:
    """Give each descriptor its number. The fork server reserves these numbers, so none of `wanted` has one yet."""
    for number, now in wanted.items():
        os.dup2(now, number, inheritable=number < STATUS)
    for number in range(PAIR, PAYLOAD + 1):  # a missing standard input stays /dev/null
        if number not in wanted:
            os.close(number)


def limit_all() -> None:
    """Set, for this process and its children, the limits that are the same for all jobs."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_STACK, _STACK_BYTES),
    ):
        value = min(value, _hard_limit(kind))
        resource.setrlimit(kind, (value, value))


def _hard_limit(kind: int) -> int:
    """Return the hard limit as a comparable number."""
    hard = resource.getrlimit(kind)[1]
    return _NO_LIMIT if hard == resource.RLIM_INFINITY else hard


READY, OUT_OF_MEMORY = b"R", b"M"
"""Written to the status pipe: the program began; a MemoryError ended it. Anything else before READY is the reason why
the program did not begin."""
_MOST_FRAMES = 1000


def run_child(confine: Callable[[], None], entry: Callable[[bytes], None]) -> None:
    """Confine this process and run the entry; does not return."""
    try:
        confine()
        with open(PAYLOAD, "rb") as file:
            file.seek(0)
            payload = file.read()
        os.write(STATUS, READY)
    except BaseException as error:
        # The program did not run: the service raises SandboxUnavailable.
        with contextlib.suppress(OSError):
            os.write(STATUS, f"{type(error).__name__}: {error}".encode()[:512])
        os._exit(1)
    os._exit(_run(entry, payload))


def _run(entry: Callable[[bytes], None], payload: bytes) -> int:
    """Run the entry, wait for its threads and run its exit functions. Return the exit status."""
    try:
        status = _guarded(lambda: entry(payload))
        if threading.active_count() > 1:
            status = status or _guarded(threading._shutdown)  # type: ignore[attr-defined]
        status = status or _guarded(atexit._run_exitfuncs)
        return status or _guarded(_flush)
    except BaseException:  # objects of the program may raise even while its error is printed
        return 1


def _guarded(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as error:
        _guarded(_flush)
        code: Any = error.code
        if code is None:
            return 0
        if issubclass(type(code), int):  # isinstance would ask its __class__, which may lie
            return int.__and__(code, 0xFF)
        os.write(2, f"{code}\n".encode(errors="replace"))
        return 1
    except BaseException as error:
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            with contextlib.suppress(OSError):
                os.write(STATUS, OUT_OF_MEMORY)
        with contextlib.suppress(BaseException):
            _flush()
        _show(error)
        return 1
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _show(error: BaseException) -> None:
    """Write the traceback without the sandbox's frames."""
    linecache.clearcache()
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error), limit=-_MOST_FRAMES))
    os.write(2, text.encode(errors="replace"))


def _own_frames(error: BaseException):
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("quartet_reward.sandbox"):
        trace = trace.tb_next
    return trace


_NAME = "program.py"


def main(payload: bytes) -> None:
    """Compile and run `payload`. Raises what the program raises, SyntaxError if it does not compile."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__=_NAME)
    sys.modules["__main__"] = module
    sys.argv[:] = [_NAME]
    exec(compile(payload, _NAME, "exec", dont_inherit=True), module.__dict__)
