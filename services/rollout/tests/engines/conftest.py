"""Engines under test: each kind with tied and with untied embeddings, loaded once, brought back after each test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Harness, Sender
from models import write_model

from quartet_rollout.engines import create_engine

OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"place": "process", "device": "cpu", "max_num_seqs": 64},
    "transformers_thread": {"place": "thread", "device": "cpu", "max_num_seqs": 64},
    "vllm": {"kv_cache_gib": 0.0625, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
}
FORMS = ["transformers-untied", "transformers_thread-tied", "vllm-tied", "vllm-untied"]
"""Each engine and each host, and of each engine both kinds of embeddings."""


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run a coroutine in the session's event loop: engines live longer than a test."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Path]:
    """Model folders by (tied, seed), seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("models")
    return {
        (tied, seed): write_model(folder / f"{'tied' if tied else 'untied'}-{seed}", tied=tied, seed=seed)
        for tied in (True, False)
        for seed in (0, 1)
    }


@pytest.fixture(scope="session")
def sender() -> Iterator[Sender]:
    """A process that plays the trainer."""
    process = Sender()
    yield process
    process.stop()


@pytest.fixture(scope="session", params=FORMS)
def loaded(request: pytest.FixtureRequest, run: Any, models: Any, sender: Sender) -> Iterator[Harness]:
    kind, embeddings = request.param.split("-")
    tied = embeddings == "tied"
    folders = models[tied, 0], models[tied, 1]
    engine = create_engine(kind.partition("_")[0], str(folders[0]), OPTIONS[kind])
    run(engine.start())
    yield Harness(engine, OPTIONS[kind], folders, run, sender)
    run(engine.close())


@pytest.fixture
def harness(loaded: Harness) -> Iterator[Harness]:
    """The engine with the weights of seed 0 as version 0."""
    loaded.reset()
    yield loaded
    loaded.check_idle()
