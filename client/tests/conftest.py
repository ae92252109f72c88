"""Fixtures of the client's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # small_services.py is beside the tests, not in a package

from small_services import SmallServices  # noqa: E402

from quartet_common.ports import free_port


@pytest.fixture
def services():
    """The small services, running."""
    with SmallServices() as running:
        yield running


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def write(tmp_path):
    """Write a file of the given name and text; return its path."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write
