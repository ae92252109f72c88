"""A running reward service over a real socket, the pool alone, and sandboxes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from reward_samples import Running, serving
from sandbox_modes import MODES, open_sandbox, sandbox, settings  # noqa: F401

from quartet_reward.math.equality import worker_command
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.workers.pool import WorkerPool


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """One worker that lives for three tasks."""
    pool = WorkerPool("math", worker_command(1 << 30), 600.0, queue_seconds=60.0, recycle_after=3)
    pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(params=MODES, loop_scope="module", scope="module")
async def any_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One of each mode, for the tests of a file, which are on one event loop."""
    try:
        sandbox = await open_sandbox(settings(request.param), only=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()
