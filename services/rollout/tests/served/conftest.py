"""One rollout with its model endpoint for all tests here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[3] / "tests" / "preloaded", HERE.parent / "service", HERE.parent / "engines", HERE):
    sys.path.insert(0, str(folder))
from preloaded import Pythons  # noqa: E402 (beside the other suites' tests)
from serving import Playing, playing_in  # noqa: E402


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run a coroutine in the event loop of the rollout."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def playing(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playing]:
    """A whole rollout with its model endpoint."""
    # Engines set it for their own processes; interpreters that are preloaded must not inherit it.
    os.environ.pop("QUARTET_ENGINE_OWNER", None)
    pythons = Pythons()
    python = str(pythons["vllm"])
    with pytest.MonkeyPatch.context() as patch:
        # The engine's processes are forked from one that has imported what they need.
        patch.setattr(sys, "executable", python)
        patch.setattr(spawn, "_python_exe", python.encode())
        context = playing_in(tmp_path_factory.mktemp("playing"), run)
        yield run(context.__aenter__())
        run(context.__aexit__(None, None, None))
    pythons.close()
