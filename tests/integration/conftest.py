"""A small model and problems for it; services started by hand and cleaned up after."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from by_hand import ENVIRONMENTS, ROOT, ByHand

_MAKE_MODEL = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
save(build_model(0), build_tokenizer(), Path(sys.argv[1]))
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model before any training."""
    folder = tmp_path_factory.mktemp("model")
    python = ENVIRONMENTS / "trainer" / "bin" / "python"
    subprocess.run([python, "-c", _MAKE_MODEL, folder], cwd=ROOT / "examples" / "arithmetic", check=True, timeout=120)
    return folder


@pytest.fixture
def by_hand(model: Path, tmp_path: Path) -> Iterator[Callable[..., ByHand]]:
    """Return services for the demo's run file with a few untrained steps; overrides win."""
    made: list[ByHand] = []

    def make(**overrides: object) -> ByHand:
        for name in ("train", "heldout"):
            lines = [
                json.dumps({"prompt": f"{n % 5 + 1}+{n % 3 + 1}=?", "gt_answer": str(n % 5 + n % 3 + 2)})
                for n in range(30)
            ]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        settings: dict[str, object] = {
            "run.id": "by-hand",
            "run.folder": tmp_path / "run",
            "run.group_size": 4,
            "run.groups_per_step": 4,
            "run.max_steps": 6,
            "model.path": model,
            "data.train": tmp_path / "train.jsonl",
            "data.evaluation.heldout": tmp_path / "heldout.jsonl",
            "trainer.evaluation.interval": 3,
            "trainer.checkpoint.interval": 2,
        }
        settings |= {key.replace("__", "."): value for key, value in overrides.items()}
        services = ByHand(tmp_path, ROOT / "examples" / "arithmetic" / "run.toml", settings)
        made.append(services)
        return services

    yield make
    for services in made:
        services.close()
