"""A core in a process of its own: what becomes of one when the other dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

import pytest
from engine_owner import Owner
from harness import PATIENCE, PROMPT

from quartet_rollout.engines import EngineError, create_engine
from quartet_rollout.engines.options import TransformersOptions

OPTIONS = {"place": "process", "device": "cpu", "max_num_seqs": 8}


def test_it_ends_with_its_rollout_and_not_before(models: dict) -> None:
    owner = Owner("transformers", models[True, 0], **OPTIONS)
    try:
        (process,) = owner.processes
        assert os.getpgid(process.pid) != os.getpgid(owner.process.pid)  # Ctrl-C in a terminal is for the rollout.
        process.send_signal(signal.SIGTERM)  # As systemd tells all of a service's processes: the rollout drains first.
        assert len(owner.order(do="generate", prompt=PROMPT, length=5)["tokens"]) == 5
        owner.process.kill()
        assert process.wait(PATIENCE) is None and not process.is_running()
    finally:
        owner.stop()


def test_its_log_is_the_rollouts(models: dict, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        engine: Any = create_engine("transformers", str(models[True, 0]), OPTIONS)
        await engine.start()
        with pytest.raises(
            EngineError, match="the transformers engine failed: 'Stepping' object has no attribute 'fly'"
        ):
            await engine._ask("fly")
        await engine.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(body(), PATIENCE))
    (line,) = [record for record in caplog.records if record.name == "quartet_rollout.engines.runner"]
    assert line.getMessage().startswith("the engine failed\nTraceback")


def test_the_place_is_said_by_the_options() -> None:
    assert TransformersOptions().place == "auto"
