"""A small model, problems, and services that are stopped after a test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from by_hand import ENVIRONMENTS, ROOT, SERVICES, ByHand, write_sums  # isort: skip
import fixtures  # beside what `by_hand` imports
from preloaded import Pythons

pythons, model = fixtures.pythons, fixtures.model
ORDINARY = {name: ENVIRONMENTS / name / "bin" / "python" for name in (*SERVICES, "environment", "client")}


@pytest.fixture
def by_hand(model: Path, pythons: Pythons, tmp_path: Path) -> Iterator[Callable[..., ByHand]]:
    """Return services for the demo's run file with a few steps and an untrained model, and overrides. `ordinary`: with
    vLLM and without preloaded interpreters, as for users. `run_file`: another of the demo's folder."""
    made: list[ByHand] = []

    def make(ordinary: bool = False, run_file: str = "run.toml", **overrides: object) -> ByHand:
        for name in ("train", "heldout"):
            write_sums(tmp_path / f"{name}.jsonl")
        settings: dict[str, object] = {
            "run.id": "by-hand",
            "run.folder": tmp_path / "run",
            "run.group_size": 4,
            "run.groups_per_step": 4,
            "run.max_steps": 6,
            "run.max_queued_prompts": 64,
            "model.path": model,
            "rollout.engine": "vllm" if ordinary else "transformers",
            "data.train": tmp_path / "train.jsonl",
            "data.evaluation.heldout": tmp_path / "heldout.jsonl",
            "trainer.evaluation.interval": 3,
            "trainer.checkpoint.interval": 2,
        }
        settings |= {key.replace("__", "."): value for key, value in overrides.items()}
        services = ByHand(
            tmp_path,
            ROOT / "examples" / "arithmetic" / run_file,
            ORDINARY if ordinary else pythons,
            settings,
        )
        made.append(services)
        return services

    yield make
    for services in made:
        services.close()
