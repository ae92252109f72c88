"""Pytest fixtures: preloaded interpreters, and the demo's model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Pythons, make_models


@pytest.fixture(scope="session")
def pythons() -> Iterator[Pythons]:
    """The services' interpreters, whose imports start immediately."""
    with contextlib.closing(Pythons()) as made:
        for name in ("broker", "reward", "rollout", "trainer"):
            made.start(name)
        yield made


@pytest.fixture(scope="session")
def model(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, untrained."""
    folder = tmp_path_factory.mktemp("model")
    make_models(pythons["trainer"], folder)
    return folder
