"""Chooses the strongest mode that holds on this machine, by trying each: started, and attacked."""

import asyncio
import json
import os
import time

from quartet_common.log import get_logger
from quartet_reward.config import Mode, SandboxSection
from quartet_reward.errors import ShuttingDown
from quartet_reward.sandbox.api import Execution, ExitReason, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.pool import IsolatedSandbox

log = get_logger(__name__)

# Tries what must fail and leaves a process behind that must be killed. Prints the names of what did not fail.
_PROBE = b"""
import json, os, socket, sys
import colorsys, xml.dom.minidom  # not preloaded: the library can be read
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
_PROBE_LIMITS = Limits(wall_seconds=20, cpu_seconds=20)


def candidates() -> list[Mode]:
    """Return the modes that this user can try, the strongest first."""
    if os.geteuid() == 0:
        return list(Mode)
    return [Mode.NAMESPACES]


async def open_sandbox(
    settings: SandboxSection, only: Mode | None = None, queue_seconds: float = 300.0
) -> IsolatedSandbox:
    """Start the strongest sandbox that holds here, or the mode `only`.

    Raises:
        SandboxUnavailable: none does that is at least `settings.minimum`; the text says why and what would help.
    """
    order = list(Mode)
    reasons = []
    for mode in candidates():
        if order.index(mode) > order.index(settings.minimum) or only not in (None, mode):
            continue
        sandbox = IsolatedSandbox(settings, mode, queue_seconds)
        try:
            await sandbox.start()
            await probe(sandbox)
        except SandboxUnavailable as error:
            await sandbox.close()
            reasons.append(f"{mode}: {error}")
            log.warning("a mode of the sandbox is not to be had here", extra={"mode": mode, "reason": str(error)})
            continue
        except BaseException:
            await sandbox.close()
            raise
        return sandbox
    raise SandboxUnavailable(
        f"no mode of the sandbox at least as strong as reward.sandbox.minimum = {settings.minimum.value!r} holds here "
        f"({'; '.join(reasons) or 'this user can try none of them'}). Allow user namespaces to this user (sysctl "
        "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0), or run the service as root on a "
        "kernel with Landlock."
    )


async def probe(sandbox: IsolatedSandbox) -> None:
    """Attack a sandbox from inside. Raises SandboxUnavailable, naming what is not kept from a program."""
    secrets = ["/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/var/log", os.path.dirname(__file__)]
    survivors = sandbox.survivors
    facts = json.dumps([secrets, os.getpid()]).encode()
    execution = await sandbox.run(Job("script", _PROBE, facts, _PROBE_LIMITS))
    if execution.ending is not ExitReason.EXITED or execution.exit_code != 0:
        ending = f"{execution.ending}, {execution.stderr.decode(errors='replace')[-300:]}"
        raise SandboxUnavailable(f"the probe did not end well: {ending}")
    leaks = json.loads(execution.stdout)
    if sandbox.survivors > survivors:
        leaks.append("a process that outlives its tree")
    if leaks:
        raise SandboxUnavailable(f"it does not keep a program from: {', '.join(sorted(set(leaks)))}")


_RETRY_SECONDS = 10.0


class LazySandbox:
    """The sandbox as verifiers use it: it starts with the first program. For one event loop."""

    def __init__(self, settings: SandboxSection, queue_seconds: float = 300.0):
        self._settings = settings
        self._queue_seconds = queue_seconds
        self._sandbox: IsolatedSandbox | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._refusal: tuple[float, str] | None = None

    async def run(self, job: Job) -> Execution:
        """Run one job alone; again if something outside killed it. Cancelling the task kills the job's process tree.

        Raises:
            SandboxUnavailable: the job could not be run.
            ShuttingDown: the sandbox is closed.
        """
        return await (await self._opened()).run(job)

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        """Run two jobs in two sandboxes, joined by a socket pair (descriptor 3 in each) and by nothing else.

        The judge alone has a report pipe (descriptor 4). When the judge ends, the candidate is killed. When the
        candidate ends first, the judge reads the end of the socket and goes on to its own end. Raises as `run`.
        """
        return await (await self._opened()).run_judged(judge, candidate)

    async def close(self) -> None:
        """Kill everything that runs and free what is held. May be called again."""
        self._closed = True
        async with self._lock:
            if self._sandbox:
                await self._sandbox.close()

    async def _opened(self) -> IsolatedSandbox:
        if self._sandbox is None:
            async with self._lock:
                if self._closed:
                    raise ShuttingDown
                if self._sandbox is None:
                    await self._open()
        assert self._sandbox is not None
        return self._sandbox

    async def _open(self) -> None:
        if self._refusal and time.monotonic() < self._refusal[0]:
            raise SandboxUnavailable(self._refusal[1])
        try:
            self._sandbox = await open_sandbox(self._settings, queue_seconds=self._queue_seconds)
        except SandboxUnavailable as error:
            self._refusal = time.monotonic() + _RETRY_SECONDS, str(error)
            raise


async def check_sandbox(settings: SandboxSection) -> str:
    """Return the mode that holds here. Raises SandboxUnavailable."""
    sandbox = await open_sandbox(settings)
    await sandbox.close()
    return sandbox.mode
