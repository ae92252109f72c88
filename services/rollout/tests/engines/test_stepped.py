"""The thread around a core: what it does when the core fails, is closed, or cannot be made."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_rollout.engines import EngineError, SamplingSettings, create_engine
from quartet_rollout.engines.core import CoreCompletion
from quartet_rollout.engines.stepped import SteppedEngine
from quartet_rollout.engines.stepping import version_spans
from quartet_rollout.engines.thread_host import ThreadHost
from quartet_rollout.weights.manifest import ModelSpec


class CountingCore:
    """Gives each completion the tokens 0, 1, 2, … for ever."""

    gives_masks = False
    can_sleep = True
    max_model_len, vocab_size = 1000, 10

    def __init__(self, fail_after: int | None = None) -> None:
        self.rows: dict[str, int] = {}
        self.fail_after = fail_after
        self.closed = False
        self.asleep = 0

    def add(self, key: str, prompt_token_ids: list[int], sampling: SamplingSettings) -> None:
        self.rows[key] = 0

    def step(self) -> list[CoreCompletion]:
        for key in self.rows:
            self.rows[key] += 1
        if self.fail_after is not None and max(self.rows.values()) > self.fail_after:
            raise RuntimeError("out of memory")
        return []

    def abort(self, keys: Any) -> list[CoreCompletion]:
        tokens = {key: self.rows.pop(key) for key in list(keys) if key in self.rows}
        return [
            CoreCompletion(k, np.arange(n, dtype=np.int32), np.zeros(n, np.float32), "abort") for k, n in tokens.items()
        ]

    def hold(self) -> list[CoreCompletion]:
        return []

    def go_on(self) -> None:
        """Nothing to do."""

    def lengths(self) -> dict[str, int]:
        return dict(self.rows)

    def tokens(self) -> int:
        return sum(self.rows.values())

    def running(self) -> int:
        return len(self.rows)

    def kv_cache_use(self) -> float:
        return -1.0

    def sleep(self, level: int) -> None:
        self.asleep = level

    def wake(self) -> None:
        self.asleep = 0

    def close(self) -> None:
        self.closed = True


def engine_of(build: Any) -> SteppedEngine:
    host = ThreadHost("counting", build if callable(build) else lambda: build)
    return SteppedEngine("counting", host, lambda: None, lambda: ModelSpec({}, frozenset()))


async def _collect(engine: SteppedEngine, request_id: str = "r") -> list:
    return [completion async for completion in engine.generate(request_id, [1], 2, SamplingSettings())]


async def test_a_core_that_fails_ends_every_request_with_its_reason() -> None:
    engine = engine_of(CountingCore(fail_after=5))
    await engine.start()
    with pytest.raises(EngineError, match="the counting engine failed: out of memory"):
        await _collect(engine)
    with pytest.raises(EngineError, match="out of memory"):
        await _collect(engine)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.pause("wait")
    assert engine.policy_version == -1 and engine.failure == "the counting engine failed: out of memory"
    await engine.close()


async def test_closing_ends_running_completions_and_the_thread() -> None:
    core = CountingCore()
    engine = engine_of(core)
    await engine.start()
    reading = asyncio.create_task(_collect(engine))
    await _tokens_from(engine, 10)
    await engine.close()
    await engine.close()
    assert [completion.finish_reason for completion in await reading] == ["abort", "abort"]
    assert core.closed
    with pytest.raises(EngineError, match="closed"):
        await _collect(engine)


async def test_who_asks_while_it_is_being_closed_is_told() -> None:
    engine = engine_of(CountingCore())
    await engine.start()
    asking = asyncio.create_task(_collect(engine))
    closing = asyncio.create_task(engine.close())
    with pytest.raises(EngineError, match="the engine is closed"):
        await asking
    await closing


async def _tokens_from(engine: SteppedEngine, tokens: int) -> None:
    while engine.stats().tokens_total < tokens:
        await asyncio.sleep(0.001)


async def test_asleep_nothing_is_generated_and_awake_it_goes_on() -> None:
    core = CountingCore()
    engine = engine_of(core)
    await engine.start()
    assert "sleep" in engine.capabilities()
    reading = asyncio.create_task(_collect(engine))
    await _tokens_from(engine, 10)
    await engine.sleep(1)
    await engine.sleep(1)  # Again is allowed.
    with pytest.raises(EngineError, match="the engine sleeps at level 1; wake it first"):
        await engine.sleep(2)
    tokens = engine.stats().tokens_total
    await engine.pause("keep")
    await engine.resume()  # Ends a pause, and no sleep.
    assert core.asleep == 1 and engine.stats().tokens_total == tokens
    assert engine.stats().running == 2
    with pytest.raises(EngineError, match="the engine sleeps: wake it before weights are installed"):
        await engine._ask("install", iter(()), 1)
    await engine.wake()
    await engine.wake()
    assert core.asleep == 0
    await _tokens_from(engine, tokens + 10)
    await engine.abort("r")
    assert len(await reading) == 2
    await engine.close()


async def test_weights_that_were_forgotten_asleep_are_of_unknown_version() -> None:
    engine = engine_of(CountingCore())
    await engine.start()
    await engine.set_version(7)
    await engine.sleep(1)
    await engine.wake()
    assert engine.policy_version == 7
    await engine.pause("keep")
    await engine.sleep(2)
    await engine.wake()
    assert engine.policy_version == -1
    reading = asyncio.create_task(_collect(engine))
    while engine.stats().waiting < 2:  # The pause stands.
        await asyncio.sleep(0.001)
    assert engine.stats().tokens_total == 0
    await engine.resume()
    await _tokens_from(engine, 10)
    await engine.abort("r")
    assert len(await reading) == 2
    await engine.close()


async def test_a_core_that_cannot_be_made_says_why() -> None:
    def broken() -> Any:
        raise RuntimeError("no such kernel")

    engine = engine_of(broken)
    with pytest.raises(EngineError, match="the counting engine did not start: no such kernel"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize("name", ["vllm", "transformers"])
async def test_a_missing_model_folder_is_named(name: str, tmp_path: Path) -> None:
    engine = create_engine(name, str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="nowhere' does not exist"):
        await engine.start()
    await engine.close()


def test_unknown_engines_and_options_are_named() -> None:
    with pytest.raises(ValueError, match="engine 'sglang' does not exist; allowed: transformers, vllm"):
        create_engine("sglang", "model")
    with pytest.raises(ValueError, match="max_num_seqs"):
        create_engine("vllm", "model", {"max_num_seqs": 0})
    for options, said in (
        ({"form": "async"}, "form: vllm always computes in processes of its own now; leave the key out"),
        ({"place": "thread"}, "place: vllm always"),
        ({"max_num_batched_token": 1}, "no such engine argument; did you mean max_num_batched_tokens?"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode: it is set by the rollout"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            create_engine("vllm", "model", options)
    with pytest.raises(ValueError, match="kv_cache"):
        create_engine("transformers", "model", {"kv_cache": 1})


def test_spans_join_equal_neighbours_and_leave_out_empty_ones() -> None:
    assert version_spans([(0, 0)], 5) == ((0, 0, 5),)
    assert version_spans([(0, 0), (1, 3), (2, 3)], 5) == ((0, 0, 3), (2, 3, 5))
    assert version_spans([(0, 0), (-1, 2), (0, 2)], 4) == ((0, 0, 4),)
    assert version_spans([(0, 0), (1, 4)], 4) == ((0, 0, 4),)
    assert version_spans([(0, 0)], 0) == ()
