"""The process of the transformers engine: it ends with its rollout, says why it fails, and is closed in order."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_owner import Owner
from harness import PATIENCE, PROMPT

from quartet_rollout.engines import EngineCompletion, EngineError, SamplingSettings, create_engine

OPTIONS = {"device": "cpu", "max_num_seqs": 8}


def test_it_ends_with_its_rollout_and_not_before(models: dict) -> None:
    owner = Owner("transformers", models[True, 0], **OPTIONS)
    try:
        (process,) = owner.processes
        assert os.getpgid(process.pid) != os.getpgid(owner.process.pid)  # Ctrl-C in a terminal is for the rollout.
        process.send_signal(signal.SIGTERM)  # As systemd tells all of a service's processes: the rollout drains first.
        assert len(owner.ask(do="generate", prompt=PROMPT, length=5)["tokens"]) == 5
        owner.process.kill()
        assert process.wait(PATIENCE) is None and not process.is_running()
    finally:
        owner.stop()


async def two(engine: Any, tokens: int = 400) -> list[EngineCompletion]:
    sampling = SamplingSettings(max_new_tokens=tokens, stop_token_ids=(), temperature=0.0)
    return [completion async for completion in engine.generate("r", PROMPT, 2, sampling)]


async def begun(engine: Any) -> asyncio.Task:
    task = asyncio.create_task(two(engine))
    while engine.stats().tokens_total < 10:
        await asyncio.sleep(0.001)
    return task


async def test_a_loop_that_fails_ends_every_request_with_its_reason(
    models: dict, forked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = create_engine("transformers", str(models[True, 0]), OPTIONS)
    with forked(), caplog.at_level(logging.ERROR):
        await engine.start()
        await engine.pause("keep")
        waiting = asyncio.create_task(two(engine))
        why = "the transformers engine failed: 'EngineLoop' object has no attribute 'fly'"
        for call in (engine._ask("fly"), waiting, two(engine), engine.pause("wait")):
            with pytest.raises(EngineError, match=why):
                await call
    assert engine.policy_version == -1 and engine.failure == why
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.getMessage().startswith("the engine failed\nTraceback")
    await engine.close()


async def test_closing_ends_running_completions_and_whoever_asks_meanwhile_is_told(models: dict, forked: Any) -> None:
    engine: Any = create_engine("transformers", str(models[True, 0]), OPTIONS)
    with pytest.raises(EngineError, match="the engine has not been started"):
        await engine.resume()
    with forked():
        await engine.start()
    with pytest.raises(EngineError, match="started already"):
        await engine.start()
    running = await begun(engine)
    closing = asyncio.create_task(engine.close())
    late = asyncio.create_task(engine.pause("wait"))
    await closing
    await engine.close()
    assert [completion.finish_reason for completion in await running] == ["abort", "abort"]
    for call in (late, two(engine)):
        with pytest.raises(EngineError, match="the engine is closed"):
            await call
    assert not engine.failure and engine._process.returncode == 0


async def test_a_model_that_cannot_be_loaded_is_said(models: dict, forked: Any, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models[True, 0] / name, tmp_path)
    engine = create_engine("transformers", str(tmp_path), OPTIONS)
    with forked(), pytest.raises(EngineError, match="the transformers engine did not start: .*model.safetensors"):
        await engine.start()
    await engine.close()
