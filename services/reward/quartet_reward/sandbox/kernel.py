"""System calls that Python lacks: numbers, constants and calls by ctypes."""

import ctypes
import os
import platform
from typing import Any

# "name x86-64 aarch64", "-" where the machine has no such call.
# Allowed in the sandbox with any arguments:
_HARMLESS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, close 3 57, close_range 436 436, stat 4 -, fstat 5 80,
lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, poll 7 -, ppoll 271 73, select 23 -,
pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
epoll_pwait2 441 441, eventfd2 290 19, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216,
madvise 28 233, brk 12 214, msync 26 227, mincore 27 232, fadvise64 221 223, rt_sigaction 13 134, rt_sigprocmask 14
135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131
132, access 21 -, faccessat 269 48, faccessat2 439 439, pipe 22 -, pipe2 293 59, dup 32 23, dup2 33 -, dup3 292 24,
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time
201 -, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -, getpid 39 172, getppid 110 173,
gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120
150, getgroups 115 158, getpgrp 111 -, getpgid 121 155, setpgid 109 154, getsid 124 156, setsid 112 157, fork 57 -,
vfork 58 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, uname 63 160, fsync 74 82, fdatasync 75 83,
truncate 76 45, ftruncate 77 46, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename
82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, linkat 265
37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, chmod 90 -,
fchmod 91 52, fchmodat 268 53, umask 95 166, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, fallocate
285 47, copy_file_range 326 285, sendfile 40 71, splice 275 76, tee 276 77, getrlimit 97 163, getrusage 98 165,
sysinfo 99 179, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, getpriority 140 141, setpriority 141 140,
set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, futex 202 98, futex_waitv 449 449, restart_syscall 219
128, getrandom 318 278, membarrier 324 283, getcpu 309 168, recvfrom 45 207, shutdown 48 210, getsockopt 55 209,
getsockname 51 204, getpeername 52 205
"""
# Allowed with some arguments, or used by the sandbox itself:
_OTHER = """
clone 56 220, clone3 435 435, kill 62 129, tgkill 234 131, tkill 200 130, ioctl 16 29, fcntl 72 25, prctl 157 167,
arch_prctl 158 -, socketpair 53 199, sendto 44 206, prlimit64 302 261, mount 165 40, umount2 166 39, pivot_root 155
41, unshare 272 97, setns 308 268, mount_setattr 442 442, capset 126 91, landlock_create_ruleset 444 444,
landlock_add_rule 445 445, landlock_restrict_self 446 446, seccomp 317 277, pidfd_send_signal 424 424
"""
_COLUMNS = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
MACHINE = platform.machine()


class UnknownMachine(Exception):
    """The sandbox has no table of this machine's system calls."""


def _numbers(table: str) -> dict[str, int]:
    if MACHINE not in _COLUMNS:
        raise UnknownMachine(
            f"the sandbox supports the system calls of {', '.join(_COLUMNS)}; this machine is {MACHINE!r}"
        )
    column = _COLUMNS[MACHINE][0]
    rows = [row.split() for row in table.replace("\n", " ").split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


HARMLESS = _numbers(_HARMLESS)
NUMBERS = HARMLESS | _numbers(_OTHER)
AUDIT_ARCH = _COLUMNS[MACHINE][1]

# PyDLL holds the GIL during calls, so that the child of a clone holds it too.
LIBC = ctypes.PyDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

CLONE_VM, CLONE_PIDFD = 0x100, 0x1000
NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEWPID, NEWNET, NEWCGROUP, NEWTIME = 0x20000000, 0x40000000, 0x02000000, 0x80
ALL_NEW = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWCGROUP
WAIT_ALL = 0x40000000
"""__WALL: wait for children that end without SIGCHLD too."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def check(result: int, what: str) -> int:
    """Return a call's result. Raises OSError, which names `what`, if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: Any) -> int:
    """Make a system call. Raises OSError."""
    return check(LIBC.syscall(NUMBERS[name], *(_long(argument) for argument in arguments)), name)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    call("prctl", option, value, 0, 0, 0)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount. Raises OSError naming the target."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    check(result, f"mount {kind or source} on {target}")


def _long(argument: Any) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument
