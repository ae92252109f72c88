"""The sandbox that hostile programs meet: the strongest that this machine has."""

import contextlib
from collections.abc import AsyncIterator

from quartet_reward.sandbox.api import Sandbox
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.settings import SandboxSection


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Sandbox]:
    """Open a sandbox for the time of the block. Raises SandboxUnavailable where none is good enough."""
    sandbox = await open_sandbox(SandboxSection())
    try:
        yield sandbox
    finally:
        await sandbox.close()
