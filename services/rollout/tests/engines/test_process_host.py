"""A core in a process of its own: what becomes of one when the other dies, and what they say to each other."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from harness import PATIENCE, PROMPT
from owner import Owner

from quartet_rollout.engines import EngineCompletion, EngineError, SamplingSettings, WeightInstallError, create_engine
from quartet_rollout.engines.base import SamplingMask
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.stepping import Request
from quartet_rollout.engines.wire import (
    pack_error,
    pack_mail,
    pack_requests,
    unpack_error,
    unpack_mail,
    unpack_requests,
)

OPTIONS = {"place": "process", "device": "cpu", "max_num_seqs": 8}


@pytest.fixture
def owner(models: dict) -> Iterator[Owner]:
    started = Owner("transformers", models[True, 0], **OPTIONS)
    yield started
    started.stop()


def test_it_ends_with_its_rollout_and_not_before(owner: Owner) -> None:
    (process,) = owner.processes
    process.send_signal(signal.SIGTERM)  # As systemd tells all of a service's processes: the rollout drains first.
    assert len(owner.order(do="generate", prompt=PROMPT, length=5)["tokens"]) == 5
    owner.process.kill()
    assert process.wait(PATIENCE) is None and not process.is_running()


def test_a_rollout_that_is_interrupted_at_a_terminal_keeps_its_engine(owner: Owner) -> None:
    (process,) = owner.processes
    assert os.getpgid(process.pid) != os.getpgid(owner.process.pid)


def test_one_that_is_killed_fails_the_engine(owner: Owner) -> None:
    owner.processes[0].kill()
    for _ in range(2):
        failure = owner.order(do="generate", prompt=PROMPT, length=20)["error"]
        assert failure == "the transformers engine failed: its process ended with signal 9"


def test_whoever_waits_is_told_when_it_is_killed(models: dict) -> None:
    async def body() -> None:
        engine = create_engine("transformers", str(models[True, 0]), OPTIONS)
        await engine.start()
        # An engine of an earlier test may have ended and not be reaped yet.
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        (process,) = (child for child in children if "engines.child" in " ".join(child.cmdline()))
        process.suspend()
        reading = asyncio.create_task(anext(engine.generate("r", PROMPT, 1, SamplingSettings())))
        draining, asked = asyncio.create_task(engine.pause("wait")), asyncio.create_task(engine.resume())
        await asyncio.sleep(0)  # All three have asked.
        process.kill()
        for waiting in (reading, draining, asked):
            with pytest.raises(EngineError, match="its process ended with signal 9"):
                await waiting
        assert engine.policy_version == -1
        assert engine.failure == "the transformers engine failed: its process ended with signal 9"
        await engine.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


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
    with pytest.raises(ValueError, match="place is 'process' with form 'async'"):
        create_engine("vllm", "model", {"form": "async", "place": "process"})


def test_requests_come_over_as_they_were() -> None:
    sampling = SamplingSettings(0.5, 0.9, 3, 0.1, 7, ("a", "bc"), (4, 5), 11, masks=True)
    requests = [Request(3, "name", [5, 6, 7], 2, sampling), Request(4, "other", [8], 1, SamplingSettings())]
    assert unpack_requests(*pack_requests(requests)) == requests


def test_completions_come_over_as_they_were() -> None:
    def one(index: int, mask: SamplingMask | None) -> EngineCompletion:
        ids, log_probs = np.arange(index + 1, dtype=np.int32), np.linspace(-1, 0, index + 1, dtype=np.float32)
        return EngineCompletion(index, ids, log_probs, "length", ((0, 0, 1), (4, 1, index + 1)), mask)

    mask = SamplingMask(np.array([0, 2], np.int32), np.array([8, 9], np.int32))
    mail: list[Any] = [(1, one(1, mask)), (2, EngineError("gone")), (1, one(2, None))]
    (first, failed, third) = unpack_mail(*pack_mail(mail))
    assert failed[0] == 2 and type(failed[1]) is EngineError and str(failed[1]) == "gone"
    for (number, came), (_, sent) in zip((first, third), (mail[0], mail[2]), strict=True):
        assert number == 1
        assert (came.index, came.finish_reason, came.version_spans) == (sent.index, "length", sent.version_spans)
        np.testing.assert_array_equal(came.token_ids, sent.token_ids)
        np.testing.assert_array_equal(came.log_probs, sent.log_probs)
    np.testing.assert_array_equal(first[1].mask.counts, mask.counts)
    np.testing.assert_array_equal(first[1].mask.token_ids, mask.token_ids)
    assert third[1].mask is None


def test_errors_come_over_by_kind() -> None:
    assert type(unpack_error(pack_error(WeightInstallError("x")))) is WeightInstallError
    other = unpack_error(pack_error(ZeroDivisionError("y")))
    assert type(other) is EngineError and str(other) == "y"
