"""The system call filter, as a BPF program.

It is an allow-list: every other call, of a newer kernel too, fails with EPERM. clone3 fails with ENOSYS, because a
filter cannot read its flags: libc falls back to clone, whose flags it can. exec is refused: the sandbox's root has
nothing to run, and a child that execs would end with SIGCHLD, which the fork server ignores. No program can cause a
SIGKILL or stop a process, by a call or as the signal of a descriptor or of a child's end: a signal that does so, and
that the sandbox did not send, came from outside.
"""

import ctypes
import errno
import signal
import struct

from quartet_reward.sandbox import kernel

# F_SETPIPE_SZ: no limit counts the memory of pipes. F_GETLK, F_OFD_GETLK: locks on shared files are a channel between
# programs. F_SETSIG: the signal could be SIGKILL.
_FCNTL_REFUSED = (1031, 5, 36, 10)
_AF_UNIX = 1
_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41
_ARCH_SET_FS = 0x1002
# FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TCGETS, TIOCGWINSZ: what libc and Python ask of files and pipes.
_IOCTLS = (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x5413)

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_OF_OUTSIDE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_EXIT_SIGNAL = 0xFF  # of the flags of clone


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(index: int, high: bool = False) -> bytes:
    return _line(_LOAD, _ARGUMENTS + 8 * index + 4 * high)


def _refuse(number: int) -> bytes:
    return _line(_RETURN, _REFUSE | number)


def _only(index: int, values: tuple[int, ...], otherwise: int) -> bytes:
    """Allow if the low half of an argument is one of `values`; the kernel reads these arguments as 32-bit integers."""
    lines = [_argument(index)]
    lines += [_line(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return b"".join([*lines, _refuse(otherwise), _line(_RETURN, _ALLOW)])


def _none_of(index: int, values: tuple[int, ...]) -> bytes:
    """Refuse if the low half of an argument is one of `values`."""
    lines = [_argument(index)]
    lines += [_line(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return b"".join([*lines, _line(_RETURN, _ALLOW), _refuse(errno.EPERM)])


def _null(index: int) -> bytes:
    """Allow if a pointer is null."""
    tests = [_argument(index), _line(_EQUAL, 0, 0, 2), _argument(index, high=True), _line(_EQUAL, 0, 1, 0)]
    return b"".join([*tests, _refuse(errno.EPERM), _line(_RETURN, _ALLOW)])


def _choose(ranges: list[tuple[int, bytes]]) -> bytes:
    """Binary search for a call number. `ranges`: the first number of each range and its code, which must return."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _choose(ranges[:middle]), _choose(ranges[middle:])
    return _line(_AT_LEAST, ranges[middle][0], len(below) // 8, 0) + below + above


def assemble() -> bytes:
    """Return the program.

    For each new process the kernel verifies and compiles it and runs it for every system call: 0.1 ms with the binary
    search, 0.24 ms with a linear list.
    """
    allow, refuse = _line(_RETURN, _ALLOW), _refuse(errno.EPERM)
    of_outside = [_line(_EQUAL, number, len(_OF_OUTSIDE) - place) for place, number in enumerate(_OF_OUTSIDE)]
    clone = [
        _argument(0),
        _line(_ANY_BIT, kernel.ALL_NEW, len(_OF_OUTSIDE) + 2, 0),
        _line(_AND, _EXIT_SIGNAL),
        *of_outside,
        allow,
        refuse,
    ]
    special = {
        "clone": b"".join(clone),
        "clone3": _refuse(errno.ENOSYS),
        "fcntl": _none_of(1, _FCNTL_REFUSED),
        "kill": _none_of(1, _OF_OUTSIDE),
        "tkill": _none_of(1, _OF_OUTSIDE),
        "tgkill": _none_of(2, _OF_OUTSIDE),
        "ioctl": _only(1, _IOCTLS, errno.ENOTTY),
        "prctl": _only(0, (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA), errno.EPERM),
        "prlimit64": _null(2),  # limits can be read, not set
        "sendto": _null(4),  # on a connected socket only
        "socketpair": _only(0, (_AF_UNIX,), errno.EPERM),
    }
    if "arch_prctl" in kernel.NUMBERS:
        special["arch_prctl"] = _only(0, (_ARCH_SET_FS,), errno.EPERM)
    bodies = dict.fromkeys(kernel.HARMLESS.values(), allow)
    bodies |= {kernel.NUMBERS[name]: body for name, body in special.items()}
    ranges = [(0, bodies.get(0, refuse))]
    for number in range(1, max(bodies) + 2):
        body = bodies.get(number, refuse)
        if body != ranges[-1][1]:
            ranges.append((number, body))
    head = [_line(_LOAD, _ARCH), _line(_EQUAL, kernel.AUDIT_ARCH, 1, 0), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    if kernel.MACHINE == "x86_64":
        head += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _KILL)]
    return b"".join([*head, _choose(ranges)])


class Filter:
    """The assembled program, installed by each child."""

    def __init__(self) -> None:
        program = assemble()
        self._code = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of instructions, padding, where they are.
        header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self._code))
        self._program = ctypes.create_string_buffer(header, len(header))
        self._arguments = (ctypes.c_long(kernel.NUMBERS["seccomp"]), ctypes.c_long(1), ctypes.c_long(0), self._program)

    def install(self) -> None:
        """Filter this process and its descendants for good. Needs no_new_privs. Raises OSError."""
        kernel.check(kernel.LIBC.syscall(*self._arguments), "seccomp")
