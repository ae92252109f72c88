"""The filter of system calls, run as the kernel's machine would run it."""

import errno
import struct

import pytest

from quartet_reward.sandbox import seccomp
from quartet_reward.sandbox.kernel import ALL_NEW, AUDIT_ARCH, HARMLESS, MACHINE, NUMBERS

_ALLOWED, _KILLED = 0x7FFF0000, 0x80000000
_REFUSED, _UNKNOWN, _NO_TERMINAL = (0x50000 | number for number in (errno.EPERM, errno.ENOSYS, errno.ENOTTY))
_ANYTHING = (1 << 64) - 1


def _verdict(number: int, *arguments: int, machine: int = AUDIT_ARCH) -> int:
    program = seccomp.assemble()
    padded = (*arguments, *[_ANYTHING] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, machine, 0, *padded)
    place = register = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        match code:
            case 0x06:
                return value
            case 0x20:
                (register,) = struct.unpack_from("<I", data, value)
            case 0x15:
                place += if_true if register == value else if_false
            case 0x35:
                place += if_true if register >= value else if_false
            case 0x54:
                register &= value
            case 0x45:
                place += if_true if register & value else if_false
            case _:
                raise AssertionError(f"instruction {place - 1} has the code {code:#x}")


def test_it_allows_what_is_listed_and_nothing_else():
    asked = {NUMBERS[name] for name in ("clone3", "ioctl", "prctl", "prlimit64", "sendto", "socketpair")}
    asked |= {NUMBERS[name] for name in ("clone", "fcntl", "kill", "tkill", "tgkill", "arch_prctl") if name in NUMBERS}
    for number in sorted({*range(max(NUMBERS.values()) + 100), 0x3FFFFFFF} - asked):
        expected = _ALLOWED if number in HARMLESS.values() else _REFUSED
        assert _verdict(number) == expected, number


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (0x3D0F00,), _ALLOWED),
        *(("clone", (0x4100 | number,), _REFUSED) for number in (9, 19, 20, 21, 22)),
        ("clone", (0x4100 | 17,), _ALLOWED),
        *(("kill", (1, number), _REFUSED) for number in (19, 20, 21, 22)),
        *(("clone", (1 << bit,), _REFUSED if 1 << bit & ALL_NEW else _ALLOWED) for bit in range(32)),
        ("kill", (1, 15), _ALLOWED),
        ("kill", (1, 9), _REFUSED),
        ("tgkill", (1, 1, 9), _REFUSED),
        ("clone3", (0,), _UNKNOWN),
        ("fcntl", (0, 1), _ALLOWED),
        ("fcntl", (0, 1 << 32 | 5), _REFUSED),
        ("fcntl", (0, 10, 9), _REFUSED),
        ("ioctl", (0, 0x541B), _ALLOWED),
        ("ioctl", (0, 0x5412), _NO_TERMINAL),
        ("prctl", (4,), _REFUSED),
        ("prlimit64", (0, 0, 1 << 40), _REFUSED),
        ("sendto", (0, 0, 0, 0, 0), _ALLOWED),
        ("sendto", (0, 0, 0, 0, 1), _REFUSED),
        ("socketpair", (2,), _REFUSED),
    ],
)
def test_some_calls_depend_on_their_arguments(name: str, arguments: tuple[int, ...], expected: int):
    assert _verdict(NUMBERS[name], *arguments) == expected


def test_other_machines_calls_kill():
    assert _verdict(NUMBERS["read"], machine=0x40000003) == _KILLED
    if MACHINE == "x86_64":
        assert _verdict(0x40000000) == _KILLED
