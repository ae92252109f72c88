"""A program that attacks a new sandbox from inside, to check that its confinement works."""

import json
import os

from quartet_reward.sandbox.api import Execution, ExitReason, Job, Limits, SandboxUnavailable

# Tries what must fail, prints what succeeded, and leaves a process behind, which the sandbox must kill.
_PROBE = b"""
import json, os, socket, sys
import colorsys, xml.dom.minidom  # not preloaded: they must be readable
SECRETS, PARENT = json.loads(sys.stdin.read())
leaks = []
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW)
        leaks.append("network")
    except OSError:
        pass
for path in SECRETS:
    try:
        os.close(os.open(path, os.O_RDONLY))
        leaks.append("file system: " + path)
    except OSError:
        pass
for folder in ("/", "/usr/lib", "/var/tmp", "/dev/shm", "/dev"):
    try:
        os.close(os.open(folder + "/quartet-probe", os.O_CREAT | os.O_WRONLY))
        leaks.append("writing to " + folder)
    except OSError:
        pass
try:
    os.kill(PARENT, 0)
    leaks.append("processes of others")
except OSError:
    pass
print(json.dumps(leaks), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 1)
        import time
        time.sleep(60)
    os._exit(0)
"""


def job() -> Job:
    secrets = ["/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/var/log", os.path.dirname(__file__)]
    facts = json.dumps([secrets, os.getpid()]).encode()
    return Job("script", _PROBE, facts, Limits(wall_seconds=20, cpu_seconds=20))


def require_no_leak(execution: Execution, survived: bool) -> None:
    """Raise SandboxUnavailable naming what the probe could do. `survived`: a process outlived its tree."""
    if execution.ending is not ExitReason.EXITED or execution.exit_code != 0:
        ending = f"{execution.ending}, {execution.stderr.decode(errors='replace')[-300:]}"
        raise SandboxUnavailable(f"the probe failed: {ending}")
    leaks = json.loads(execution.stdout)
    if survived:
        leaks.append("a process that outlives its tree")
    if leaks:
        raise SandboxUnavailable(f"it does not keep a program from: {', '.join(sorted(set(leaks)))}")
