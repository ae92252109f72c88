"""The service's sandbox: started when the first program comes, in the strongest mode that holds."""

import asyncio
import time

from quartet_reward.sandbox.api import Execution, Job, SandboxUnavailable
from quartet_reward.sandbox.isolated import IsolatedSandbox
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.settings import SandboxSection

_RETRY_SECONDS = 10.0


class ChosenSandbox:
    """A Sandbox that costs nothing until it is used."""

    def __init__(self, settings: SandboxSection):
        self._settings = settings
        self._sandbox: IsolatedSandbox | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._refusal: tuple[float, str] | None = None

    @property
    def mode(self) -> str:
        """Which mechanisms hold; `none` before the first program."""
        return self._sandbox.mode if self._sandbox else "none"

    async def run(self, job: Job) -> Execution:
        """Run one job alone; see the Protocol."""
        return await (await self._opened()).run(job)

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        """Run two jobs joined by a socket pair; see the Protocol."""
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
                    raise SandboxUnavailable("the sandbox is closed")
                if self._sandbox is None:
                    await self._open()
        assert self._sandbox is not None
        return self._sandbox

    async def _open(self) -> None:
        if self._refusal and time.monotonic() < self._refusal[0]:
            raise SandboxUnavailable(self._refusal[1])
        try:
            self._sandbox = await open_sandbox(self._settings)
        except SandboxUnavailable as error:
            self._refusal = time.monotonic() + _RETRY_SECONDS, str(error)
            raise


async def check(settings: SandboxSection) -> str:
    """Return the mode that holds here. Raises SandboxUnavailable."""
    sandbox = await open_sandbox(settings)
    await sandbox.close()
    return sandbox.mode
