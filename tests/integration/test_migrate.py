"""`quartet migrate-colossalchat`: what it prints is a run file that every service accepts."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from by_hand import SERVICES, ByHand
from preloaded import Pythons

Run = Callable[..., subprocess.CompletedProcess]
FLAGS = (
    '-m {model} -d {data} -ed \'{{"heldout": "{data}"}}\' -ei 10 -g 4 -tbs 2 -t 1 -b transformers -mnt 64 -p moved -a'
)


@pytest.fixture
def run(pythons: Pythons) -> Run:
    def run(service: str, *words: str) -> subprocess.CompletedProcess:
        command = [pythons[service], "-m", f"quartet_{service}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


def migrated(run: Run, model: Path, folder: Path, algorithm: str) -> Path:
    data = folder / "data.jsonl"
    line = {"messages": {"role": "user", "content": "1+1=?"}, "gt_answer": "2"}
    data.write_text("".join(json.dumps(line) + "\n" for _ in range(8)))
    made = run("client", "migrate-colossalchat", FLAGS.format(model=model, data=data) + " " + algorithm)
    assert made.returncode == 0, made.stderr
    path = folder / f"{algorithm}.toml"
    path.write_text(made.stdout)
    return path


def accepts(run: Run, service: str, path: Path, *settings: str) -> dict:
    """What its dry run prints."""
    words = [word for setting in (f"run.folder={path.parent / 'run'}", *settings) for word in ("--set", setting)]
    dry = run(service, str(path), "--dry-run", *words)
    assert dry.returncode == 0, f"{service} refuses\n{path.read_text()}\n{dry.stderr}"
    return json.loads(dry.stdout)


def test_every_service_accepts_what_is_printed(run: Run, by_hand: Callable[..., ByHand], model: Path, tmp_path: Path):
    path = migrated(run, model, tmp_path, "GRPO")
    services = by_hand()
    services.start_redis()
    for service in SERVICES:
        accepts(run, service, path, f"broker.redis_url=redis://127.0.0.1:{services.redis_port}/0")
