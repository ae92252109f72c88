"""The modes of the sandbox that can be tried on this machine, what each needs, and what they leave behind."""

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quartet_reward.config import Mode, SandboxSection
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox, modes_to_try

MODES = modes_to_try()


async def open_sandbox(section: SandboxSection, only: Mode | None = None, queue_seconds: float = 300.0) -> Sandbox:
    """Raises SandboxUnavailable."""
    sandbox = Sandbox(section, queue_seconds, only)
    await sandbox.start()
    return sandbox


def settings(mode: Mode, slots: int = 4) -> SandboxSection:
    """Return settings for a mode."""
    return SandboxSection(slots=slots, python=interpreter(mode))


def interpreter(mode: Mode) -> str:
    """An interpreter that the users of a mode can read, if the one of these tests lies where only root may go."""
    own = Path(os.path.realpath(sys.base_prefix))
    if mode is Mode.NAMESPACES_UID or all(folder.stat().st_mode & 0o1 for folder in (own, *own.parents)):
        return ""
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else ""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """The strongest that this machine has, for the tests of a file, which are on one event loop."""
    sandbox = await open_sandbox(SandboxSection())
    yield sandbox
    await sandbox.close()


@pytest_asyncio.fixture(params=MODES, loop_scope="module", scope="module")
async def any_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One of each mode, likewise."""
    try:
        sandbox = await open_sandbox(settings(request.param), only=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()


def own_processes() -> set[int]:
    """The processes of sandboxes of this process: they bear its number in the command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f'"parent": {os.getpid()}'.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def below(pids: list[int | None]) -> list[int]:
    """All descendants of some processes, the oldest first; none of None."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
            found += [*children, *below(children)]
    return sorted(found)
