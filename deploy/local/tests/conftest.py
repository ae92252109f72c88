"""A tiny untrained model, a few problems, and a run file; `launch` starts runs of it and cleans up after them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launched import Launched, Pythons, free_ports, preloaded_checkout  # isort: skip
import fixtures  # beside what `launched` imports

pythons, model = fixtures.pythons, fixtures.model


@pytest.fixture(scope="session")
def checkout(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose services begin with their imports done, on the CPU also where there are GPUs."""
    return preloaded_checkout(tmp_path_factory.mktemp("checkout"), pythons)


@pytest.fixture
def run_file(model: Path, tmp_path: Path) -> Path:
    """A run of three steps that takes seconds, on free ports."""
    problems = [{"prompt": f"1+{number}=?", "gt_answer": str(1 + number)} for number in range(8)]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    broker, reward, rollout, trainer = free_ports(4)
    path = tmp_path / "run.toml"
    path.write_text(f"""
[run]
id = "launched"
folder = "{tmp_path / "run"}"
group_size = 2
groups_per_step = 2
max_staleness = 1
max_steps = 3
[run.sampling]
max_new_tokens = 8
[model]
path = "{model}"
[data]
train = "{train}"
passes = 0
[addresses]
broker = "127.0.0.1:{broker}"
reward = "127.0.0.1:{reward}"
rollout = "127.0.0.1:{rollout}"
trainer = "127.0.0.1:{trainer}"
[rollout]
engine = "transformers"
""")
    return path


@pytest.fixture
def launch(checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start `quartet run`, or another `command`, with the arguments given; in the preloaded checkout or `checkout`."""
    started: list[Launched] = []

    def start(*arguments: object, **options) -> Launched:
        output = tmp_path / f"output-{len(started)}.txt"
        launched = Launched([str(argument) for argument in arguments], output, **{"checkout": checkout, **options})
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.close()
