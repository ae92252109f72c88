"""The process of the transformers engine: it ends with its rollout, says why it fails, and is closed in order."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_owner import Owner
from harness import PATIENCE, PROMPT

from quartet_rollout.engines import EngineCompletion, EngineError, SamplingSettings, create_engine
from quartet_rollout.engines.transformers_engine.engine import TransformersEngine

OPTIONS = {"device": "cpu", "max_num_seqs": 8}


def test_it_ends_with_its_rollout_and_not_before(models: dict, forked: Any, tmp_path: Path) -> None:
    with forked(), closing(Owner("transformers", models[True, 0], tmp_path / "log", **OPTIONS)) as owner:
        (process,) = owner.processes
        assert os.getpgid(process.pid) != os.getpgid(owner.pid)  # Ctrl-C in a terminal is for the rollout.
        process.send_signal(signal.SIGTERM)  # As systemd tells all of a service's processes: the rollout drains first.
        assert len(owner.order(do="generate", prompt=PROMPT, length=5)["tokens"]) == 5
        owner.kill()
        assert process.wait(PATIENCE) is None and not process.is_running()


async def two(engine: Any) -> list[EngineCompletion]:
    sampling = SamplingSettings(max_new_tokens=400, stop_token_ids=(), temperature=0.0)
    return [completion async for completion in engine.generate("r", PROMPT, 2, sampling)]


async def test_closing_ends_running_completions_and_whoever_asks_meanwhile_is_told(models: dict, forked: Any) -> None:
    engine: Any = create_engine("transformers", str(models[True, 0]), OPTIONS)
    with pytest.raises(EngineError, match="the engine has not been started"):
        await engine.resume()
    with forked():
        await engine.start()
    with pytest.raises(EngineError, match="started already"):
        await engine.start()
    running = asyncio.create_task(two(engine))
    while engine.stats().tokens_total < 10:
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(engine.close())
    late = asyncio.create_task(engine.pause("wait"))
    await closing
    await engine.close()
    assert [completion.finish_reason for completion in await running] == ["abort", "abort"]
    for call in (late, two(engine)):
        with pytest.raises(EngineError, match="the engine is closed"):
            await call
    assert not engine.failure and engine._process.returncode == 0


async def test_a_start_that_is_cancelled_leaves_no_process(models: dict, forked: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(f"{TransformersEngine.__module__}.CLOSE_SECONDS", PATIENCE)
    engine: Any = create_engine("transformers", str(models[True, 0]), OPTIONS)
    with forked():
        starting = asyncio.create_task(engine.start())
        while engine._reading is None:
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.wait({starting})
    await engine.close()
    assert engine._reading.exception() is None and engine._process.returncode == 0
