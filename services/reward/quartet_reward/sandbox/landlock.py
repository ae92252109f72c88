"""Landlock: what a process may reach of files, sockets and processes, decided by the process itself and for good.

Where namespaces hold, this is the second fence; where there are none, it is the only one around the file system.
"""

import ctypes
import os
import struct

from quartet_reward.sandbox.syscalls import LIBC, NUMBERS, call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_DEVICES = (1 << 6) | (1 << 11) | (1 << 9)  # make character devices, block devices, sockets
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
READ = _EXECUTE | _READ_FILE | _READ_DIR
_RULE_PATH_BENEATH = 1


def version() -> int:
    """Return the kernel's Landlock version, 0 if it has none."""
    return max(0, LIBC.syscall(NUMBERS["landlock_create_ruleset"], None, ctypes.c_long(0), ctypes.c_long(1)))


class Landlock:
    """Read and execute beneath some folders, everything beneath one, no network, no signals to the outside."""

    def __init__(self, readable: list[str], devices: list[str]):
        """Prepare. `devices` may be written too. Raises OSError if Landlock is missing."""
        self.version = version()
        if not self.version:
            raise OSError("this kernel has no Landlock")
        handled = (1 << 13) - 1
        handled |= (_REFER if self.version >= 2 else 0) | (_TRUNCATE if self.version >= 3 else 0)
        handled |= _IOCTL_DEV if self.version >= 5 else 0
        network = 3 if self.version >= 4 else 0  # TCP: bind, connect
        scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if self.version >= 6 else 0
        self._attributes = struct.pack("QQQ", handled, network, scope)
        self._size = 24 if self.version >= 6 else 16 if self.version >= 4 else 8
        self._everything = handled & ~_DEVICES & ~_IOCTL_DEV
        self._rules = [(_handle(path), READ if os.path.isdir(path) else READ & ~_READ_DIR) for path in readable]
        self._rules += [(_handle(path), _READ_FILE | _WRITE_FILE) for path in devices if os.path.exists(path)]

    def put_on(self, writable: str | None) -> None:
        """Confine this process. Needs no_new_privs. Raises OSError."""
        ruleset = call("landlock_create_ruleset", self._attributes, self._size, 0)
        for descriptor, rights in self._rules:
            self._allow(ruleset, descriptor, rights)
        if writable:
            folder = _handle(writable)
            self._allow(ruleset, folder, self._everything)
            os.close(folder)
        call("landlock_restrict_self", ruleset, 0)
        os.close(ruleset)

    def _allow(self, ruleset: int, descriptor: int, rights: int) -> None:
        call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)


def _handle(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)
