"""The last of the contract, as it costs the engine: who waits is told when the process that computes is killed."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from harness import PATIENCE, PROMPT, Harness
from preloaded import process_of

from quartet_rollout.engines import EngineError, SamplingSettings

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def processes() -> list[psutil.Process]:
    """The engine's."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    others = ("resource_tracker", "sender.py", "server.py")
    own = [child for child in children if not any(other in " ".join(child.cmdline()) for other in others)]
    return [psutil.Process(process_of(child.pid)) for child in own]


def test_a_process_that_is_killed_fails_its_engine_and_whoever_waits_is_told(loaded: Harness) -> None:
    engine = loaded.engine
    (process,) = processes()

    async def body() -> None:
        process.suspend()
        waiting = [asyncio.create_task(loaded.collect(PROMPT, 1, SamplingSettings()))]
        waiting += [asyncio.create_task(engine.pause("wait")), asyncio.create_task(engine.resume())]
        await asyncio.sleep(0)  # All have asked.
        process.kill()
        how = "its process ended with signal 9" if engine.name == "transformers" else ""
        for waiter in (*waiting, loaded.collect(PROMPT, 1, SamplingSettings())):
            with pytest.raises(EngineError, match=f"the {engine.name} engine failed: {how}") as caught:
                await waiter
            assert str(caught.value) == engine.failure
        assert engine.policy_version == -1

    loaded.run(body())
