"""`quartet migrate-colossalchat`: what it prints is a run file that every service accepts."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from by_hand import ENVIRONMENTS, ByHand

FLAGS = (
    '-m {model} -d {data} -ed \'{{"heldout": "{data}"}}\' -ei 10 -g 4 -tbs 2 -t 1 -b transformers -mnt 64 -p moved -a'
)


def run(service: str, *words: str) -> subprocess.CompletedProcess:
    command = {
        "client": [str(ENVIRONMENTS / "client/bin/quartet")],
        **{
            name: [str(ENVIRONMENTS / name / "bin/python"), "-m", f"quartet_{name}"]
            for name in ("broker", "reward", "rollout", "trainer")
        },
    }[service]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, check=False)


def migrated(model: Path, folder: Path, algorithm: str) -> Path:
    data = folder / "data.jsonl"
    line = {"messages": {"role": "user", "content": "1+1=?"}, "gt_answer": "2"}
    data.write_text("".join(json.dumps(line) + "\n" for _ in range(8)))
    made = run("client", "migrate-colossalchat", FLAGS.format(model=model, data=data) + " " + algorithm)
    assert made.returncode == 0, made.stderr
    path = folder / f"{algorithm}.toml"
    path.write_text(made.stdout)
    return path


def accepts(service: str, path: Path, *settings: str) -> None:
    words = [word for setting in (f"run.folder={path.parent / 'run'}", *settings) for word in ("--set", setting)]
    dry = run(service, str(path), "--dry-run", *words)
    assert dry.returncode == 0, f"{service} refuses\n{path.read_text()}\n{dry.stderr}"


@pytest.mark.slow
def test_every_service_accepts_what_is_printed(by_hand: Callable[..., ByHand], model: Path, tmp_path: Path):
    path = migrated(model, tmp_path, "GRPO")
    services = by_hand()
    services.start_redis()
    for service in ("broker", "reward", "rollout", "trainer"):
        accepts(service, path, f"broker.redis_url=redis://127.0.0.1:{services.redis_port}/0")


@pytest.mark.parametrize("algorithm", ["DAPO", "REINFORCE_PPB", "RLOO"])
def test_the_trainer_accepts_every_preset(model: Path, tmp_path: Path, algorithm: str):
    accepts("trainer", migrated(model, tmp_path, algorithm))
