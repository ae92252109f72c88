"""Pytest's fixtures of preloaded interpreters, and of the demo's model, made by one of them."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import ROOT, Pythons

_MAKE_MODEL = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
save(build_model(0), build_tokenizer(), Path(sys.argv[1]))
"""


@pytest.fixture(scope="session")
def pythons() -> Iterator[Pythons]:
    """The services' interpreters, which begin to import at once."""
    with contextlib.closing(Pythons()) as made:
        for name in ("broker", "reward", "rollout", "trainer"):
            made.start(name)
        yield made


@pytest.fixture(scope="session")
def model(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model before any training."""
    folder = tmp_path_factory.mktemp("model")
    command = [pythons["trainer"], "-c", _MAKE_MODEL, folder]
    subprocess.run(command, cwd=ROOT / "examples" / "arithmetic", check=True, timeout=300)
    return folder
