"""Every annotation of every package names what there is, in the environment that the package runs in."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Of each: the environment, and modules that need another one.
PACKAGES = {
    "quartet_common": ("dev",),
    "quartet_broker": ("broker",),
    "quartet_reward": ("reward", "quartet_reward.reward_model.worker"),
    "quartet_rollout": ("rollout",),
    "quartet_trainer": ("trainer",),
    "quartet_client": ("client",),
    "quartet_local": ("dev",),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_annotations_resolve(package: str):
    environment, *left_out = PACKAGES[package]
    python = ROOT / ".quartet" / "envs" / environment / "bin" / "python"
    command = [python, Path(__file__).with_name("annotations.py"), package, *left_out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
