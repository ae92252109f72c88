"""A tiny untrained model, a few problems, and a run file; `launch` starts runs of it and cleans up after them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launched import Launched, Pythons, preloaded_checkout  # isort: skip
import fixtures  # beside what `launched` imports
from started import write_demo_run

pythons, model = fixtures.pythons, fixtures.model


@pytest.fixture(scope="session")
def checkout(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with preloaded services, for the CPU even on a host with GPUs."""
    return preloaded_checkout(tmp_path_factory.mktemp("checkout"), pythons)


@pytest.fixture
def run_file(model: Path, tmp_path: Path) -> Path:
    """A run of three steps that takes seconds, on free ports."""
    return write_demo_run(tmp_path, "launched", run={"max_staleness": 1, "max_steps": 3}, model={"path": str(model)})


@pytest.fixture
def launch(checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start `quartet run`, or another `command`, with arguments, in the preloaded checkout or `checkout`."""
    started: list[Launched] = []

    def start(*arguments: object, **options) -> Launched:
        output = tmp_path / f"output-{len(started)}.txt"
        launched = Launched([str(argument) for argument in arguments], output, **{"checkout": checkout, **options})
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.close()
