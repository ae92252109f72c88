"""Every annotation names what there is, in the packages that mypy does not read: it would need their torch."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("service", ["rollout", "trainer"])
def test_annotations_resolve(service: str):
    python = ROOT / ".quartet" / "envs" / service / "bin" / "python"
    command = [python, Path(__file__).with_name("annotations.py"), f"quartet_{service}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
