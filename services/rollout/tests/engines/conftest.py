"""Engines under test: each kind with tied and with untied embeddings, loaded once, brought back after each test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import FORMS, Harness, Sender
from models import write_model
from preloaded import Pythons

from quartet_rollout.engines import create_engine

OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"device": "cpu", "max_num_seqs": 64},
    "vllm": {"kv_cache_gib": 0.0625, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
}


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run a coroutine in the session's event loop: engines live longer than a test."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def forked() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it, processes of engines and of the tests are forked from one that has imported what they need."""
    pythons = Pythons()
    python = str(pythons["vllm"])

    @contextmanager
    def within() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", python)
            patch.setattr(spawn, "_python_exe", python.encode())
            yield

    yield within
    pythons.close()


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
def sender(forked: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """A process that plays the trainer."""
    with forked():
        started = Sender(tmp_path_factory.mktemp("sender") / "log")
    with closing(started):
        yield started


@pytest.fixture(scope="session", params=FORMS)
def loaded(request: pytest.FixtureRequest, run: Any, models: Any, sender: Sender, forked: Any) -> Iterator[Harness]:
    kind, embeddings = request.param.split("-")
    tied = embeddings == "tied"
    folders = models[tied, 0], models[tied, 1]
    engine = create_engine(kind, str(folders[0]), OPTIONS[kind])
    with forked():
        run(engine.start())
    yield Harness(engine, OPTIONS[kind], folders, run, sender)
    run(engine.close())


@pytest.fixture
def harness(loaded: Harness) -> Iterator[Harness]:
    """The engine with the weights of seed 0 as version 0."""
    loaded.reset()
    yield loaded
    loaded.check_idle()
