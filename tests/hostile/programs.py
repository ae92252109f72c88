"""Programs that attack the sandbox, each with a description and the exit reasons that show that the attack failed.

A program whose attack succeeds prints ESCAPED; one that gets an error prints REFUSED. `test_programs.py` runs all of
them in every mode that this machine supports.
"""

from dataclasses import dataclass

from quartet_reward.sandbox.api import ExitReason
from quartet_reward.sandbox.kernel import MACHINE, NUMBERS

# Numbers, for x86-64 and aarch64, of system calls that the sandbox itself does not use.
_MORE = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "kexec_load": (246, 104), "init_module": (175, 105), "personality": (135, 92), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "inotify_init1": (294, 26), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "execveat": (322, 281), "swapon": (167, 224), "reboot": (169, 142), "sethostname": (170, 161),
    "settimeofday": (164, 170), "chroot": (161, 51), "mknodat": (259, 33), "mq_open": (240, 180),
    "sched_setscheduler": (144, 119), "ioprio_set": (251, 30), "setuid": (105, 146), "quotactl": (179, 60),
    "syslog": (103, 116), "acct": (163, 89), "vmsplice": (278, 75), "move_pages": (279, 239), "kcmp": (312, 272),
    "mlockall": (151, 230), "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211),
}  # fmt: skip
CALLS = {name: numbers[0 if MACHINE == "x86_64" else 1] for name, numbers in _MORE.items()} | NUMBERS

_PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work):
    try:
        result = work()
    except (OSError, ValueError):
        print("REFUSED")
    else:
        print("ESCAPED", result)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""

EXITED, SIGNALLED, TIMED_OUT = ExitReason.EXITED, ExitReason.SIGNALLED, ExitReason.TIMED_OUT
MEMORY, OUTPUT = ExitReason.MEMORY_EXCEEDED, ExitReason.OUTPUT_EXCEEDED


@dataclass(frozen=True)
class Program:
    """An attack."""

    name: str
    tries: str
    source: str
    endings: tuple[ExitReason, ...] = (EXITED,)
    """Any of these shows that the attack failed."""
    refused: bool = False
    """It must print REFUSED."""


def _refused(name: str, tries: str, expression: str, before: str = "") -> Program:
    return Program(name, tries, f"{_PRELUDE}\n{before}\nattempt(lambda: {expression})\n", refused=True)


def _calls(name: str, tries: str, *calls: str) -> Program:
    """Return a program whose system calls must all fail. `{name}` is replaced by the number of a call."""
    lines = "\n".join(f"attempt(lambda: call({text}))" for text in calls)
    return Program(name, tries, _PRELUDE + lines.format(**CALLS), refused=True)


PROGRAMS = (
    # Using everything up
    Program("fork bomb", "processes without end",
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            (TIMED_OUT, MEMORY)),
    Program("thread bomb", "threads without end",
            "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
            (EXITED, MEMORY, TIMED_OUT)),
    Program("memory bomb", "all memory, in one process", "x = []\nwhile True: x.append(bytearray(1 << 24))", (MEMORY,)),
    Program("memory bomb of a family", "all memory, in many processes that each keep their limit", """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20); time.sleep(60)
time.sleep(60)""", (MEMORY,)),
    Program("huge integer", "9**9**9**9", "print(9**9**9**9)", (MEMORY, TIMED_OUT)),
    Program("huge list", "a list of 10**12", "[0] * 10**12", (MEMORY,)),
    Program("disk fill", "the disk, through /tmp", """
try:
    for i in range(1000):
        open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))
    print('ESCAPED')
except OSError: print('REFUSED')""", refused=True),
    Program("one huge file", "a file beyond the limit of one", """
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    d = os.open('/tmp/f', os.O_CREAT | os.O_RDWR); os.ftruncate(d, 1 << 40); print('ESCAPED')
except OSError: print('REFUSED')""", refused=True),
    Program("inode exhaustion", "files without end", """
try:
    for i in range(10**6): open(f'/tmp/{i}', 'w').close()
    print('ESCAPED')
except OSError: print('REFUSED')""", refused=True),
    Program("descriptor exhaustion", "descriptors without end", """
import os
try:
    for i in range(10**6): os.pipe()
    print('ESCAPED')
except OSError: print('REFUSED')""", refused=True),
    Program("stdout flood", "the service's memory, by output", "while True: print('x' * 65536)", (OUTPUT,)),
    Program("stderr flood", "the same by standard error",
            "import os\nwhile True: os.write(2, b'x' * 65536)", (OUTPUT,)),
    Program("large pipes", "kernel memory in pipes", _PRELUDE + """
import fcntl
r, w = os.pipe()
attempt(lambda: fcntl.fcntl(w, 1031, 1 << 20))""", refused=True),
    Program("locked memory", "memory that cannot be swapped", _PRELUDE + """
def lock():
    if libc.mlockall(3): raise OSError
attempt(lock)""", refused=True),
    # Never ending
    Program("loop", "to run for ever", "while True: pass", (TIMED_OUT,)),
    Program("loop in C", "to run for ever inside one C call", "sum(iter(int, 1))", (TIMED_OUT,)),
    Program("loop of all", "to run for ever in four processes", "import os\nos.fork(); os.fork()\nwhile True: pass",
            (TIMED_OUT,)),
    Program("regex", "catastrophic backtracking", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", (TIMED_OUT,)),
    Program("sleep", "to sleep for ever", "import time\ntime.sleep(10**6)", (TIMED_OUT,)),
    Program("deaf to signals", "to ignore every signal", """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""", (TIMED_OUT,)),
    Program("endless exceptions", "to catch every exception", """
while True:
    try:
        while True: pass
    except BaseException: pass""", (TIMED_OUT,)),
    Program("stops itself", "SIGSTOP, which no handler sees", _PRELUDE + """
import signal
attempt(lambda: os.kill(os.getpid(), signal.SIGSTOP))""", refused=True),
    Program("alarm off", "to raise its own limits", _PRELUDE + """
import resource
attempt(lambda: resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000)))""", refused=True),
    Program("waits for input", "input that never comes", "import os\nr, w = os.pipe()\nos.read(r, 1)", (TIMED_OUT,)),
    # Outliving
    Program("daemon", "to survive its parent: setsid, two forks, an open pipe", """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
print('gone')"""),
    Program("holds the pipe", "to keep the reader waiting after the end", """
import os, time
if os.fork() == 0: time.sleep(600)
os._exit(7)"""),
    Program("zombies", "children that are never reaped", """
import os, time
for _ in range(8):
    if os.fork() == 0: os._exit(0)
time.sleep(.1)"""),
    Program("orphans", "forty orphans for the first process to reap", """
import os, time
for _ in range(40):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait(); time.sleep(.001)
print('done')"""),
    Program("forks at exit", "to fork while the tree is killed", """
import os
for _ in range(4):
    if os.fork() == 0:
        while True:
            try: os.fork()
            except OSError: pass
os._exit(0)"""),
    # Others
    Program("kill everybody", "kill(-1)", "import os, signal\nos.kill(-1, signal.SIGTERM)\nprint('alone')",
            (EXITED, SIGNALLED)),
    Program("kills itself", "SIGKILL, which would seem to come from outside", """
import ctypes, fcntl, os, platform, signal, threading
libc = ctypes.CDLL(None, use_errno=True)
clone, tgkill = {"x86_64": (56, 234), "aarch64": (220, 131)}[platform.machine()]
ways = [
    lambda: os.kill(os.getpid(), 9), lambda: os.kill(0, 9), lambda: os.killpg(0, 9), lambda: signal.raise_signal(9),
    lambda: signal.pthread_kill(threading.get_ident(), 9),
    lambda: fcntl.fcntl(0, 10, 9),
    lambda: libc.syscall(tgkill, os.getpid(), os.getpid(), 9) and 1 / 0,
    lambda: libc.syscall(clone, 9, 0, 0, 0, 0) and 1 / 0,  # the signal of a child's end
]
done = []
for way in ways:
    try: way(); done.append(way)
    except (OSError, ZeroDivisionError): pass
print(done or 'REFUSED')""", refused=True),
    Program("kill the first process", "to end the namespace's first process",
            "import os, signal\ntry: os.kill(1, signal.SIGKILL)\nexcept OSError: pass\nprint('REFUSED')", refused=True),
    Program("signals by number", "any process of the machine", """
import os
found = []
for pid in range(3, 40000):
    if pid == os.getpid(): continue
    try: os.kill(pid, 0); found.append(pid)
    except OSError: pass
print('ESCAPED' if found else 'REFUSED', found)""", refused=True),
    _calls("ptrace", "to trace its parent or the first process", "{ptrace}, 16, os.getppid(), 0, 0",
           "{ptrace}, 16, 1, 0, 0", "{process_vm_readv}, 1, None, 0, None, 0, 0"),
    _calls("descriptors of others", "pidfd_open, pidfd_getfd, kcmp", "{pidfd_open}, 1, 0", "{pidfd_getfd}, 0, 0, 0",
           "{kcmp}, 1, 1, 0, 0, 0"),
    _refused("processes in /proc", "/proc of others, and its own", "os.listdir('/proc/1')"),
    _refused("environment in /proc", "environment of others", "open('/proc/1/environ').read()"),
    _refused("memory in /proc", "to write its parent's memory", "open(f'/proc/{os.getppid()}/mem', 'r+b')"),
    Program("environment", "secrets in the environment", """
import os
known = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'USER', 'LC_CTYPE', 'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS'}
print('REFUSED' if set(os.environ) <= known else 'ESCAPED', set(os.environ) - known)""", refused=True),
    Program("inherited descriptors", "what the service has open", """
import os
found = []
for d in range(3, 4096):
    try: os.fstat(d); found.append(d)
    except OSError: pass
print('REFUSED' if found in ([], [5]) else 'ESCAPED', found)""", refused=True),
    Program("status pipe", "to write to every descriptor", """
import os
for d in range(3, 256):
    try: os.write(d, b'R' * 5000)
    except OSError: pass
print('done')""", (EXITED, TIMED_OUT)),
    Program("closes everything", "to close all descriptors", "import os\nos.closerange(0, 4096)\nos._exit(3)"),
    Program("fork server's memory", "the next program's text, in memory", """
import gc
needle = 'QUARTET' + '-SECRET-OF-ANOTHER-JOB'
seen = [o for o in gc.get_objects() if isinstance(o, (str, bytes)) and needle in str(o)]
print('ESCAPED' if seen else 'REFUSED')""", refused=True),
    # Files
    _refused("/etc/shadow", "the passwords", "open('/etc/shadow').read()"),
    _refused("/etc/passwd", "the users", "open('/etc/passwd').read()"),
    _refused("root's home", "keys", "os.listdir('/root/.ssh')"),
    _refused("host files", "the checkout, by a path and by ..", "os.listdir('/tmp/../home/..//var/log')"),
    _refused("write to the root", "to leave a file outside /tmp", "open('/usr/lib/x', 'w')"),
    _refused("write to Python", "to change the library of the next program", "open(os.__file__, 'a')"),
    _refused("bytecode", "to plant bytecode", "os.mkdir(os.path.dirname(os.__file__) + '/__pycache__/x')"),
    _refused("devices", "disks", "open('/dev/vda', 'rb').read(1) or open('/dev/sda', 'rb').read(1)"),
    _refused("memory device", "kernel memory", "open('/dev/mem', 'rb')"),
    _refused("symbolic link", "a file through a link", "(os.symlink('/etc/shadow', '/tmp/s'), open('/tmp/s').read())"),
    _refused("hard link", "a file through a link", "os.link('/etc/shadow', '/tmp/s')"),
    _calls("device node", "to make a device", "{mknodat}, -100, b'/tmp/d', 0o60666, 0x0800"),
    _calls("file by handle", "to open an inode by number", "{open_by_handle_at}, -100, None, 0"),
    Program("set-uid", "to make a set-uid program and be root", _PRELUDE + """
attempt(lambda: os.setuid(0))
attempt(lambda: os.setresuid(0, 0, 0))
attempt(lambda: os.setgroups([0]))""", refused=True),
    Program("set-uid on exec", "to become root by an executable", """
import os, sys
try:
    open('/tmp/p', 'wb').write(open(sys.executable, 'rb').read()); os.chmod('/tmp/p', 0o6755)
    os.execv('/tmp/p', ['p', '-c', 'print("ESCAPED")'])
except OSError: print('REFUSED')""", refused=True),
    Program("LD_PRELOAD", "to load its own library into a program", """
import os, sys
os.environ['LD_PRELOAD'] = '/tmp/evil.so'
try: os.execv(sys.executable, ['python', '-I', '-S', '-c', 'import os; print(os.getuid() and "REFUSED" or "ESCAPED")'])
except OSError: print('REFUSED')""", refused=True),
    Program("core dump", "a core file with secrets", "import os\nos.abort()", (SIGNALLED,)),
    Program("locks as a channel", "to signal another program by locks on shared files", _PRELUDE + """
import fcntl, struct
f = open(os.__file__)
attempt(lambda: fcntl.flock(f, fcntl.LOCK_EX))
attempt(lambda: fcntl.fcntl(f, fcntl.F_GETLK, struct.pack('hhlli', 1, 0, 0, 0, 0)))""", refused=True),
    # Network
    Program("network", "TCP, UDP, IPv6, raw, netlink", _PRELUDE + """
import socket
for family, kind in ((2, 1), (2, 2), (10, 1), (2, 3), (16, 3), (17, 3), (40, 1), (38, 5)):
    attempt(lambda: socket.socket(family, kind))""", refused=True),
    _refused("unix sockets", "services of the machine", "socket.socket(socket.AF_UNIX).connect('/run/x')",
             "import socket"),
    _refused("abstract sockets", "to bind a name that others see",
             "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].bind(b'\\0quartet')", "import socket"),
    _refused("datagram to a name", "to send without connecting",
             "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', b'\\0quartet')", "import socket"),
    _refused("descriptor passing", "to hand descriptors on", "socket.send_fds(socket.socketpair()[0], [b'x'], [1])",
             "import socket"),
    _refused("name resolution", "to look a name up", "socket.getaddrinfo('example.org', 80)", "import socket"),
    # The kernel
    _calls("namespaces", "unshare, setns, clone and clone3 with namespaces", "{unshare}, 0x10000000",
           "{unshare}, 0x00020000", "{setns}, 0, 0", "{clone}, 0x10000011, 0, 0, 0, 0", "{clone3}, None, 0"),
    _calls("mounts", "mount, umount, pivot_root, chroot", "{mount}, b'none', b'/tmp', b'tmpfs', 0, 0",
           "{umount2}, b'/tmp', 2", "{pivot_root}, b'/tmp', b'/tmp'", "{chroot}, b'/tmp'",
           "{mount_setattr}, -100, b'/', 0, None, 0"),
    _calls("io_uring", "system calls that no filter sees", "{io_uring_setup}, 1, None"),
    _calls("userfaultfd", "to halt the kernel at a page", "{userfaultfd}, 1"),
    _calls("keys", "the kernel's key rings", "{keyctl}, 0, -3, 1", "{add_key}, b'user', b'x', b'y', 1, -3"),
    _calls("bpf and perf", "programs in the kernel", "{bpf}, 0, None, 0", "{perf_event_open}, None, 0, -1, -1, 0"),
    _calls("kernel modules", "to change the kernel", "{init_module}, None, 0, b''", "{kexec_load}, 0, 0, None, 0",
           "{reboot}, 0, 0, 0, None", "{swapon}, b'/tmp/x', 0", "{acct}, None", "{quotactl}, 0, None, 0, None"),
    _calls("System V and POSIX queues", "memory and messages that outlive it", "{shmget}, 1, 4096, 0o1666",
           "{msgget}, 1, 0o1666", "{semget}, 1, 1, 0o1666", "{mq_open}, b'q', 0o102, 0o666, None"),
    _calls("memfd", "memory that no limit counts, to be executed", "{memfd_create}, b'x', 0",
           "{execveat}, 0, b'', None, None, 0x1000"),
    _calls("personality", "to turn off address randomization", "{personality}, 0x0040000"),
    _calls("watching", "inotify, fanotify on shared files", "{inotify_init1}, 0", "{fanotify_init}, 0, 0"),
    _calls("clock and name", "to set the machine's clock and name", "{settimeofday}, None, None",
           "{sethostname}, b'x', 1", "{syslog}, 3, None, 0"),
    _calls("priorities", "to have more than its share",
           "{sched_setscheduler}, 0, 1, None", "{ioprio_set}, 1, 0, 0x2000",
           "{move_pages}, 0, 0, None, None, None, 0"),
    Program("nice", "a better priority", _PRELUDE + "attempt(lambda: os.nice(-5))", refused=True),
    _calls("undo", "to undo the confinement", "{prctl}, 38, 0, 0, 0, 0", "{prctl}, 4, 1, 0, 0, 0",
           "{seccomp}, 0, 0, None", "{seccomp}, 1, 0, None"),
    # Python
    Program("pickle", "to run a command by unpickling", """
import os, pickle
class Evil:
    def __reduce__(self): return os.system, ('cat /etc/shadow && echo ESCAPED',)
pickle.loads(pickle.dumps(Evil()))
print('REFUSED')""", refused=True),
    Program("crash", "to end the interpreter by a bad pointer", "import ctypes\nctypes.string_at(0)", (SIGNALLED,)),
    Program("stack", "to overflow the C stack", """
import sys
sys.setrecursionlimit(10**9)
def f(): return [f for _ in map(lambda x: f(), (1,))]
f()""", (SIGNALLED, MEMORY, EXITED, TIMED_OUT)),
    Program("deep parse", "to overflow the parser's stack", "eval('(' * 100000 + ')' * 100000)",
            (EXITED, SIGNALLED, MEMORY, OUTPUT)),
    Program("atexit", "to run for ever after the end", "import atexit, time\natexit.register(time.sleep, 600)",
            (TIMED_OUT,)),
    Program("bad exit", "an exit status of another type", "import sys\nsys.exit('\\ud800' * 10)"),
    Program("evil exception", "to raise while its error is shown", """
class Evil(Exception):
    def __str__(self): raise Evil
raise Evil"""),
    Program("null bytes", "source with null bytes", "print(1)\0print('ESCAPED')"),
    Program("no source", "source that is not UTF-8", "# coding: latin-9\n\udcff = 1"),
)  # fmt: skip
