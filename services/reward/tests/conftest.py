"""A running reward service over a real socket, and sandboxes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from reward_samples import Running, serving
from sandbox_modes import MODES, open_sandbox, sandbox, settings  # noqa: F401

from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service() -> AsyncIterator[Running]:
    """One for the tests of a file, which are on one event loop."""
    async with serving() as running:
        yield running


@pytest_asyncio.fixture(params=MODES, loop_scope="module", scope="module")
async def any_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One of each mode, for the tests of a file, which are on one event loop."""
    try:
        sandbox = await open_sandbox(settings(request.param), only=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()
